"""What every command that takes a configuration has in common."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fsdpctl.cli.console import say
from fsdpctl.config.files import choices_of
from fsdpctl.config.schema import GROUPS, KEYS
from fsdpctl.errors import UsageError

if TYPE_CHECKING:
    from fsdpctl.config.compose import Composed
    from fsdpctl.config.keys import Key


def completions(incomplete: str) -> list[str]:
    """What KEY=VALUE may become: groups and keys, then their choices."""
    name, equals, _ = incomplete.partition("=")
    if not equals:
        return [f"{each}=" for each in (*GROUPS, *KEYS) if each.startswith(incomplete)]
    values = choices_of(name) if name in GROUPS else _values_of(KEYS.get(name))
    return [f"{name}={each}" for each in values if f"{name}={each}".startswith(incomplete)]


def _values_of(key: "Key | None") -> list[str]:
    if key is None:
        return []
    truths = ["true", "false"] if key.type == "true or false" else []
    return [*key.choices, *truths, *(["auto"] if key.auto or key.is_chosen else [])]


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE.yaml] KEY=VALUE",
        show_default=False,
        autocompletion=completions,
        help="Settings, as in `model=llama3_1b strategy=full_shard optimizer.lr=1e-3`. "
        "`fsdpctl list` shows them all. A YAML file is a recipe.",
    ),
]
Recipe = Annotated[
    str | None, typer.Option(metavar="NAME|PATH", help="Start from a recipe's settings.")
]
ConfigDir = Annotated[
    Path | None, typer.Option(help="A directory with further choices, a folder per group.")
]

RanksPerNode = Annotated[
    str | None,
    typer.Option("--nproc-per-node", metavar="N", help="The same as launch.nproc_per_node=N."),
]
_RECIPES = (".yaml", ".yml")


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


def settled(asked: Asked, nproc_per_node: str | None = None) -> Asked:
    """The same in our own words: `FILE.yaml` is a recipe, `--a.b=v` and `--a.b v` are `a.b=v`.

    Raises:
        UsageError: two recipes are given.
    """
    words: list[str] = []
    recipe, rest = asked.recipe, iter(asked.words or [])
    for word in rest:
        name, equals, value = word.partition("=")
        if word.endswith(_RECIPES) and not equals and not word.startswith("-"):
            if recipe is not None:
                raise UsageError(f"{word}: a recipe was given already, {recipe}")
            recipe = word
        elif name.startswith("--") and ("." in name or name[2:] in GROUPS):  # no option is such
            words.append(f"{name[2:]}={value if equals else next(rest, '')}")
        else:
            words.append(word)
    if nproc_per_node is not None:
        words.append(f"launch.nproc_per_node={nproc_per_node}")
    return Asked(words, recipe, asked.config_dir)


def composed_from(
    words: list[str] | None, recipe: str | None, config_dir: Path | None, *, quiet: bool = False
) -> "Composed":
    """The configuration asked for; says what of the recipe was left out, unless `quiet`."""
    from fsdpctl.config.compose import compose_config

    words, recipe, config_dir = settled(Asked(words, recipe, config_dir))
    composed = compose_config(list(words or []), recipe, config_dir)
    for name in () if quiet else composed.dropped:
        say(f"recipe's {name} left out: {name.split('.')[0]} was chosen on the command line")
    return composed
