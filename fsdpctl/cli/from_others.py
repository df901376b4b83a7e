"""What `--from FILE` asks for, and how it is told."""

from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from fsdpctl.cli.config_args import ConfigArguments, normalized
from fsdpctl.cli.console import say, show_table
from fsdpctl.errors import UsageError
from fsdpctl.io.console import printable

if TYPE_CHECKING:
    from fsdpctl.estimate.from_others import Asked as AskedFromOthers

_WIDTH = 88


def asked_from(file: Path, asked: ConfigArguments) -> "AskedFromOthers":
    """The configuration of another tool in `file`, with what was typed beside it.

    Raises:
        UsageError: it cannot be estimated; or a recipe is given too.
    """
    from fsdpctl.config.importers.read import read_others

    words, recipe, config_dir = normalized(asked)
    if recipe is not None:
        raise UsageError(f"--from {file}: and the recipe {recipe}: one of them; words go with both")
    translation = read_others(file.expanduser())
    from fsdpctl.estimate.from_others import completed

    return completed(translation, list(words or []), config_dir)


def show_translation(asked: "AskedFromOthers") -> None:
    """A table of what became of the file's keys, and lines of what did not."""
    found = asked.translation
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (f"{found.tool}: {found.file}", "", "becomes", ""):
        table.add_column(Text(printable(name)))
    for row in asked.rows:
        words = [word for word in row.settings if not (found.own_engine and word[:7] == "engine=")]
        lost = [word for word in words if word in asked.overruled]
        note = row.note
        if lost:
            note = f"overruled: {' '.join(lost)}" + (f"; {note}" if note else "")
        cells = (row.key, row.value, " ".join(w for w in words if w not in lost) or "-", note)
        table.add_row(*(Text(printable(cell)) for cell in cells))
    for name, text in asked.typed.items():
        table.add_row("(typed)", "", Text(printable(f"{name}={text}")), "")
    show_table(table)
    say()
    for line in _left_out(asked):
        say(line)


def _left_out(asked: "AskedFromOthers") -> Iterator[str]:
    found = asked.translation
    if found.own_engine:
        yield f"engine  fsdpctl: {found.own_engine}"
    for row in found.excluded:
        yield f"not so  {row.key}={row.value}: {row.note}"
    if found.unrecognized:
        yield from _listed("unknown", f"may change the figure: {', '.join(found.unrecognized)}")
    if found.no_memory_effect:
        yield from _listed("unused", f"no influence on memory: {', '.join(found.no_memory_effect)}")
    yield ""


def _listed(head: str, text: str) -> Iterator[str]:
    for number, line in enumerate(wrap(text, _WIDTH, break_on_hyphens=False)):
        yield f"{head if number == 0 else '':<8}{line}"
