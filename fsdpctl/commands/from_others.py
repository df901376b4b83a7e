"""`--from FILE`: a configuration of another tool, and the report of its translation."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fsdpctl.commands.config_args import ConfigArguments, normalized
from fsdpctl.commands.console import say, show_table
from fsdpctl.errors import UsageError
from fsdpctl.importers.read import read_others

if TYPE_CHECKING:
    from fsdpctl.estimate.from_others import ImportedConfig


def asked_from(file: Path, asked: ConfigArguments) -> "ImportedConfig":
    """Return the configuration of another tool in `file`, with settings from the command line."""
    words = typed_beside(file, asked)
    translation = read_others(file.expanduser())
    from fsdpctl.estimate.from_others import completed  # imports torch, after the file is read

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
    rows = []
    for row in asked.rows:
        words = [word for word in row.settings if not (asked.own_engine and word[:7] == "engine=")]
        lost = [word for word in words if word in asked.overridden]
        note = row.note
        if lost:
            note = f"overridden: {' '.join(lost)}" + (f"; {note}" if note else "")
        settings = " ".join(word for word in words if word not in lost)
        rows.append((row.key, row.value, settings or "-", note))
    rows += [("(command line)", "", f"{name}={text}", "") for name, text in asked.typed.items()]
    show_table((f"{found.tool}: {found.file}", "", "setting", ""), rows)
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
        yield f"unknown may change the estimate: {', '.join(found.unrecognized)}"
    if found.no_memory_effect:
        yield f"unused  no effect on memory: {', '.join(found.no_memory_effect)}"
    yield ""
