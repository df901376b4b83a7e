"""What every command that takes a configuration has in common."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

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


class Asked(NamedTuple):
    """What a configuration is composed of."""

    words: list[str] | None = None
    recipe: str | None = None
    config_dir: Path | None = None


def configured(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the three parameters of a configuration in the place of its first, `Asked`."""

    def run(*args: Any, **options: Any) -> None:
        given = signature.bind(*args, **options)
        given.apply_defaults()
        asked = Asked(*(given.arguments.pop(name) for name in Asked._fields))
        command(asked, **given.arguments)

    own = zip(Asked._fields, (Words, Recipe, ConfigDir), strict=True)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    params = [inspect.Parameter(name, kind, default=None, annotation=a) for name, a in own]
    params += list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    signature = inspect.Signature(params)
    run.__signature__ = signature  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {each.name: each.annotation for each in params}
    run.__doc__ = command.__doc__
    return run


def composed_from(
    words: list[str] | None, recipe: str | None, config_dir: Path | None, *, quiet: bool = False
) -> "Composed":
    """The configuration asked for; says what of the recipe was left out, unless `quiet`."""
    from fsdpctl.config.compose import compose_config

    composed = compose_config(list(words or []), recipe, config_dir)
    for name in () if quiet else composed.dropped:
        say(f"recipe's {name} left out: {name.split('.')[0]} was chosen on the command line")
    return composed
