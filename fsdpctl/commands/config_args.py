"""The arguments of every command that takes a configuration."""

from collections.abc import Collection, Sequence
from typing import Annotated, NamedTuple

import typer

from fsdpctl.commands.printing import note, say
from fsdpctl.config.compose import Composed
from fsdpctl.config.keys import AUTO
from fsdpctl.config.options import options_of
from fsdpctl.config.schema import GROUPS, KEYS, Config, Origin
from fsdpctl.config.serialize import settings_to_yaml, user_settings
from fsdpctl.errors import UsageError, did_you_mean


def completions(incomplete: str) -> list[str]:
    """Return the completions of KEY=VALUE: groups and keys, then their values."""
    name, equals, _ = incomplete.partition("=")
    if not equals:
        names = (*GROUPS, *(each for each, key in KEYS.items() if not key.user_key))
        return [f"{each}=" for each in names if each.startswith(incomplete)]
    values = list(options_of(name)) if name in GROUPS else []
    if (key := KEYS.get(name)) is not None:
        values += [*key.choices, *(["true", "false"] if key.type == "true or false" else [])]
        values += ["auto"] if key.auto or key.auto_and_none else []
    return [f"{name}={each}" for each in values if f"{name}={each}".startswith(incomplete)]


SettingArgs = Annotated[
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
YAML = (".yaml", ".yml")
_SHOWN_ORIGINS = set(Origin) - {Origin.DEFAULT}  # in a printed recipe


class ConfigArguments(NamedTuple):
    """The command-line arguments of a configuration."""

    settings: list[str]
    recipe: str | None


def normalize(
    settings: list[str] | None, recipe: str | None = None, nproc_per_node: str | None = None
) -> ConfigArguments:
    """Normalize the notation: `FILE.yaml` is a recipe, `--a.b=v` and `--a.b v` are `a.b=v`."""
    normalized: list[str] = []
    rest = iter(settings or [])
    for text in rest:
        name, equals, value = text.partition("=")
        if text.endswith(YAML) and not equals and not text.startswith("-"):
            if recipe is not None:
                raise UsageError(f"{text}: conflicts with the recipe {recipe}; pass only one")
            recipe = text
        # No option has a dot or the name of a group.
        elif name.startswith("--") and ("." in name or name[2:] in GROUPS):
            normalized.append(f"{name[2:]}={value if equals else next(rest, '')}")
        else:
            normalized.append(text)
    if nproc_per_node is not None:
        normalized.append(f"launch.nproc_per_node={nproc_per_node}")
    return ConfigArguments(normalized, recipe)


def note_changes(composed: Composed) -> None:
    """Print ignored keys, which belong to the result, and renamed keys to standard error."""
    say(*composed.ignored_lines)
    note(*composed.renamed)


def config_as_recipe(config: Config, left_out: Collection[str] = ()) -> str:
    """Return a configuration as a recipe with the origins of values, without some settings."""
    settings = user_settings(config)
    names = [x for x in settings if not {x, x.split(".")[0]} & {*left_out}]
    origins = {name: config.origin(name) for name in names if settings[name] != AUTO}
    texts = {name: x.value for name, x in origins.items() if x in _SHOWN_ORIGINS}
    return settings_to_yaml({name: settings[name] for name in names}, texts).rstrip()


def check_choice(option: str, value: str | None, choices: Sequence[str]) -> None:
    """Raise UsageError if an option has a value that is not in `choices`."""
    if value is not None and value not in choices:
        expected = f"{', '.join(choices)}{did_you_mean(value, choices)}"
        raise UsageError(f"{option} {value}: expected {expected}")
