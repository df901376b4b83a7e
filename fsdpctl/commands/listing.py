"""`fsdpctl list` shows settings, their options, and recipes."""

from typing import Annotated, Any

import typer

from fsdpctl.commands.printing import AsJson, out, say, show_json, show_table
from fsdpctl.config.compose import default_config
from fsdpctl.config.keys import Key
from fsdpctl.config.options import first_comment, options_of
from fsdpctl.config.recipe import recipe_names
from fsdpctl.config.schema import GROUPS, KEYS, SECTIONS, Config
from fsdpctl.config.synonyms import hint
from fsdpctl.errors import UsageError
from fsdpctl.io.packages import package_folder

_NARROW = 120  # on a terminal with fewer columns, each key has its own lines instead of a table row


def list_choices(
    group: Annotated[
        str | None,
        typer.Argument(help="Group, section or key to list, as in `fsdpctl list model`."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List settings, options and recipes."""
    default = default_config()
    if as_json:
        sections = list(SECTIONS) if group is None else [group]
        descriptions = [_describe_section(each, default) for each in sections]
        recipes = {"name": "recipe", "default": None, "choices": recipe_names(), "keys": []}
        show_json(descriptions if group else [*descriptions, recipes])
    elif group is None:
        _list_everything(default)
    else:
        _list_section(group, default)


def _keys_of(group: str) -> dict[str, Key]:
    keys = {name: key for name, key in KEYS.items() if not key.user_key}
    in_group = {n: key for n, key in keys.items() if n == group or n.startswith(f"{group}.")}
    if not in_group and group not in SECTIONS:
        problem = f"no such group or key{hint(group, [*SECTIONS, *keys])}"
        raise UsageError(f"{group}: {problem} (expected {', '.join(SECTIONS)})")
    return in_group


def _describe_section(section: str, default: Config) -> dict[str, Any]:
    keys = _keys_of(section)
    is_group = section in GROUPS
    return {
        "name": section,
        "default": default.value(section) if is_group else None,
        "choices": options_of(section) if is_group else [],
        "keys": [
            {"name": name, "type": key.type, "default": _default_text(key, default),
              "allowed": key.allowed, "meaning": key.meaning}
            for name, key in keys.items()
        ],
    }  # fmt: skip


def _list_everything(default: Config) -> None:
    defaults = {group: getattr(default, group).name for group in GROUPS}
    names = {group: dict.fromkeys([first, *options_of(group)]) for group, first in defaults.items()}
    groups = [(group, ", ".join(each)) for group, each in names.items()]
    show_table(("group", "options (default first)"), groups)
    say(f"\nsections without options: {', '.join(s for s in SECTIONS if s not in GROUPS)}\n")
    folder = package_folder("recipes")
    texts = {name: first_comment(folder / f"{name}.yaml") for name in recipe_names()}
    recipes = [(name, text.partition(". ")[0].rstrip(".")) for name, text in texts.items()]
    show_table(("recipe", "purpose"), recipes)
    say("\n`fsdpctl list GROUP` shows the options and keys of a group.")


def _list_section(section: str, default: Config) -> None:
    keys = _keys_of(section)
    if section in GROUPS:
        folder = package_folder("conf") / section
        choices = {
            f"{each} (default)" if each == default.value(section) else each: folder / f"{each}.yaml"
            for each in options_of(section)
        }
        rows = [(each, first_comment(file)) for each, file in choices.items()]
        show_table(("option", "description"), rows)
        if not keys:
            return
        say("")
    if out.is_terminal and out.width < _NARROW:
        for name, key in keys.items():
            say(f"{name}={_default_text(key, default)}", f"    {key.meaning} ({key.allowed})")
        return
    lines = [(x.name, _default_text(x, default), x.allowed, x.meaning) for x in keys.values()]
    show_table(("key", "default", "allowed", "meaning"), lines)


def _default_text(key: Key, default: Config) -> str:
    return key.text(default.value(key.name)) or "-"
