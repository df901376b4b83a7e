"""The arguments of every command that takes a configuration."""

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from fsdpctl.commands.console import note, say
from fsdpctl.config.compose import Composed, First, compose_config
from fsdpctl.config.keys import Key
from fsdpctl.config.recipe import choices_of
from fsdpctl.config.schema import GROUPS, KEYS
from fsdpctl.errors import UsageError


def completions(incomplete: str) -> list[str]:
    """Return the completions of KEY=VALUE: groups and keys, then their values."""
    name, equals, _ = incomplete.partition("=")
    if not equals:
        names = (*GROUPS, *(each for each, key in KEYS.items() if not key.instead))
        return [f"{each}=" for each in names if each.startswith(incomplete)]
    values = choices_of(name) if name in GROUPS else _values_of(KEYS.get(name))
    return [f"{name}={each}" for each in values if f"{name}={each}".startswith(incomplete)]


def _values_of(key: Key | None) -> list[str]:
    if key is None:
        return []
    truths = ["true", "false"] if key.type == "true or false" else []
    return [*key.choices, *truths, *(["auto"] if key.auto or key.is_chosen else [])]


Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE.yaml] KEY=VALUE",
        show_default=False,
        autocompletion=completions,
        help="Settings, such as `model=llama3_1b strategy=full_shard optimizer.lr=1e-3`. "
        "`fsdpctl list` shows all. A YAML file is a recipe.",
    ),
]
Recipe = Annotated[
    str | None, typer.Option(metavar="NAME|PATH", help="Start from the settings of a recipe.")
]

RanksPerNode = Annotated[
    str | None,
    typer.Option("--nproc-per-node", metavar="N", help="Same as launch.nproc_per_node=N."),
]
_RECIPES = (".yaml", ".yml")


class ConfigArguments(NamedTuple):
    """The arguments that a configuration is composed of."""

    settings: list[str] | None = None
    recipe: str | None = None


def configured(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command whose first parameter is a `ConfigArguments`: typer sees its fields."""

    def run(*args: Any, **options: Any) -> None:
        given = signature.bind(*args, **options)
        given.apply_defaults()
        config = ConfigArguments(*(given.arguments.pop(name) for name in ConfigArguments._fields))
        command(config, **given.arguments)

    own = zip(ConfigArguments._fields, (Settings, Recipe), strict=True)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    params = [inspect.Parameter(name, kind, default=None, annotation=a) for name, a in own]
    params += list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    signature = inspect.Signature(params)
    run.__signature__ = signature  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {each.name: each.annotation for each in params}
    run.__doc__ = command.__doc__
    return run


def normalized(config: ConfigArguments, nproc_per_node: str | None = None) -> ConfigArguments:
    """Normalize the notation: `FILE.yaml` is a recipe, `--a.b=v` and `--a.b v` are `a.b=v`."""
    settings: list[str] = []
    recipe, rest = config.recipe, iter(config.settings or [])
    for text in rest:
        name, equals, value = text.partition("=")
        if text.endswith(_RECIPES) and not equals and not text.startswith("-"):
            if recipe is not None:
                raise UsageError(f"{text}: conflicts with the recipe {recipe}; pass only one")
            recipe = text
        elif name.startswith("--") and ("." in name or name[2:] in GROUPS):  # never an option
            settings.append(f"{name[2:]}={value if equals else next(rest, '')}")
        else:
            settings.append(text)
    if nproc_per_node is not None:
        settings.append(f"launch.nproc_per_node={nproc_per_node}")
    return ConfigArguments(settings, recipe)


def composed_from(
    config: ConfigArguments,
    *,
    quiet: bool = False,
    converted: Sequence[tuple[str, str]] | None = None,
    first: First | None = None,
) -> Composed:
    """Compose the configuration; print the ignored keys of the recipe unless `quiet`.

    `converted` and `first` are those of `compose_config`.
    """
    settings, recipe = normalized(config)
    composed = compose_config(list(settings or []), recipe, converted=converted, first=first)
    for name in () if quiet else composed.dropped:
        say(f"{name} of the recipe ignored: {name.split('.')[0]} is set on the command line")
    for line in () if quiet else composed.renamed:
        note(line)
    return composed
