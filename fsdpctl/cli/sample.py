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
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Format the prompt by the model's chat template."),
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens to generate.")] = 200,
    seed: Annotated[int, typer.Option(min=0, max=2**53, help="Seed of the random sampling.")] = 0,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=100.0,
            help="Sampling temperature.",
        ),
    ] = 0.8,
    top_p: Annotated[
        float,
        typer.Option(min=1e-6, max=1.0, help="Total probability of the tokens to sample from."),
    ] = 1.0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Choose the likeliest token.")] = False,
) -> None:
    """Generate text from a checkpoint or a model.

    With --chat and without --prompt, each line of standard input is a user message.
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
    for message in [prompt] if prompt else _user_messages():
        say(talk.answer(message))


def _user_messages() -> Iterator[str]:
    """Yield lines of standard input until it ends."""
    shown = "> " if sys.stdin.isatty() else ""
    with suppress(EOFError):
        while True:
            if message := input(shown).strip():
                yield message
