"""`fsdpctl sample`."""

from typing import Annotated

import typer

from fsdpctl.cli.checkpoint import Source, found_checkpoint
from fsdpctl.cli.console import say


def sample(
    source: Source,
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "",
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
    """Generate text from a checkpoint or a Hugging Face directory, in this process."""
    from fsdpctl.config.hub_cache import cached_model
    from fsdpctl.config.model_path import is_hugging_face
    from fsdpctl.examine.sample import sample_text
    from fsdpctl.train.generate import Sampling

    sampling = Sampling(seed, 0.0 if greedy else temperature, top_p)
    source = cached_model(source)
    place = source if is_hugging_face(source) else found_checkpoint(source)
    say(sample_text(place, prompt, tokens, sampling))
