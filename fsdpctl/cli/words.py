"""What every command that takes a configuration has in common."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdpctl.cli.console import say

if TYPE_CHECKING:
    from fsdpctl.config.compose import Composed

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        show_default=False,
        help="Settings, as in `model=llama3_1b strategy=full_shard optimizer.lr=1e-3`. "
        "`fsdpctl list` shows them all.",
    ),
]
Recipe = Annotated[
    str | None, typer.Option(metavar="NAME|PATH", help="Start from a recipe's settings.")
]
ConfigDir = Annotated[
    Path | None, typer.Option(help="A directory with further choices, a folder per group.")
]


def composed_from(
    words: list[str] | None, recipe: str | None, config_dir: Path | None, *, quiet: bool = False
) -> "Composed":
    """The configuration asked for; says what of the recipe was left out, unless `quiet`."""
    from fsdpctl.config.compose import compose_config

    composed = compose_config(list(words or []), recipe, config_dir)
    for name in () if quiet else composed.dropped:
        say(f"recipe's {name} left out: {name.split('.')[0]} was chosen on the command line")
    return composed
