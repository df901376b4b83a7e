"""`fsdpctl sample`."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated

import typer

from fsdpctl.cli.checkpoint import Source, found_checkpoint
from fsdpctl.cli.console import say


def sample(  # noqa: PLR0913  # each is an option
    source: Source,
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask the prompt by the model's chat template.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to generate.")] = 200,
    seed: Annotated[int, typer.Option(min=0, max=2**53, help="Another seed, another text.")] = 0,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="Below 1 more likely, above 1 more various.")
    ] = 0.8,
    top_p: Annotated[
        float, typer.Option(min=1e-6, max=1.0, help="Only the likeliest with so much of the odds.")
    ] = 1.0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest.")] = False,
) -> None:
    """Generate text from a checkpoint or a Hugging Face directory, in this process.

    With --chat and no --prompt, questions are lines of standard input, each with an answer.
    """
    from fsdpctl.config.hub_cache import cached_model
    from fsdpctl.config.model_path import is_hugging_face
    from fsdpctl.tools.sample import ChatSession, sample_text
    from fsdpctl.train.generate import Sampling

    sampling = Sampling(seed, 0.0 if greedy else temperature, top_p)
    source = cached_model(source)
    place = source if is_hugging_face(source) else found_checkpoint(source)
    if not chat:
        say(sample_text(place, prompt, tokens, sampling))
        return
    talk = ChatSession(place, tokens, sampling)
    for asked in [prompt] if prompt else _questions():
        say(talk.answer(asked))


def _questions() -> Iterator[str]:
    """Until the input ends."""
    shown = "> " if sys.stdin.isatty() else ""
    with suppress(EOFError):
        while True:
            if asked := input(shown).strip():
                yield asked
