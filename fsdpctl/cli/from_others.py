"""`--from FILE`: a configuration of another tool, and the report of its translation."""

from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from fsdpctl.cli.config_args import ConfigArguments, normalized
from fsdpctl.cli.console import add_row, new_table, say, show_table
from fsdpctl.errors import UsageError

if TYPE_CHECKING:
    from fsdpctl.estimate.from_others import ImportedConfig

_WIDTH = 88


def asked_from(file: Path, asked: ConfigArguments) -> "ImportedConfig":
    """Return the configuration of another tool in `file`, with settings from the command line."""
    from fsdpctl.config.importers.read import read_others

    words = typed_beside(file, asked)
    translation = read_others(file.expanduser())
    from fsdpctl.estimate.from_others import completed

    return completed(translation, words)


def typed_beside(file: Path, asked: ConfigArguments) -> list[str]:
    """Return the settings of the command line; UsageError if a recipe is given too."""
    words, recipe = normalized(asked)
    if recipe is not None:
        raise UsageError(f"--from {file}: conflicts with the recipe {recipe}; pass only one")
    return list(words or [])


def show_translation(asked: "ImportedConfig") -> None:
    """Print a table of the file's keys with their settings, then the keys without any."""
    found = asked.translation
    table = new_table(f"{found.tool}: {found.file}", "", "setting", "")
    for row in asked.rows:
        words = [word for word in row.settings if not (asked.own_engine and word[:7] == "engine=")]
        lost = [word for word in words if word in asked.overridden]
        note = row.note
        if lost:
            note = f"overridden: {' '.join(lost)}" + (f"; {note}" if note else "")
        settings = " ".join(word for word in words if word not in lost)
        add_row(table, row.key, row.value, settings or "-", note)
    for name, text in asked.typed.items():
        add_row(table, "(command line)", "", f"{name}={text}", "")
    show_table(table)
    say()
    for line in _left_out(asked):
        say(line)


def _left_out(asked: "ImportedConfig") -> Iterator[str]:
    found = asked.translation
    if asked.own_engine:
        yield f"engine  fsdpctl: {asked.own_engine}"
    for row in found.excluded:
        yield f"differs {row.key}={row.value}: {row.note}"
    if found.unrecognized:
        yield from _listed("unknown", f"may change the estimate: {', '.join(found.unrecognized)}")
    if found.no_memory_effect:
        yield from _listed("unused", f"no effect on memory: {', '.join(found.no_memory_effect)}")
    yield ""


def _listed(head: str, text: str) -> Iterator[str]:
    for number, line in enumerate(wrap(text, _WIDTH, break_on_hyphens=False)):
        yield f"{head if number == 0 else '':<8}{line}"
