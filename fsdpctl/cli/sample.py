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
) -> None:
    """Generate text from a checkpoint, in this process."""
    from fsdpctl.train.sample import sample_text

    say(sample_text(found_checkpoint(source), prompt, tokens, seed))
