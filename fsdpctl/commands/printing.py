"""Prints lines, tables and panels."""

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Annotated, Literal, NamedTuple

import typer
from rich.cells import cell_len
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fsdpctl.io.activity import QUIET, Reporter
from fsdpctl.io.terminal import LenientConsole, wrapped
from fsdpctl.io.texts import one_line, printable

_GAP = 2  # blanks between columns
_FEW_WORDS = 3  # blanks in a cell; a cell with fewer is not wrapped
_NOTHING = ("", "-")  # texts of empty cells
_MANY_ROWS = 1000
_LONGEST = 2000  # characters of an error, which may quote a long value

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

out = LenientConsole(highlight=False, soft_wrap=True)
err = LenientConsole(highlight=False, soft_wrap=True, stderr=True)


def say(*lines: str) -> None:
    """Print lines to standard output, wrapped at words if that is a terminal."""
    for line in lines:
        _print(out, printable(line))


def info(line: str, show: Callable[[str], None] = say) -> None:
    """Print a line with `show`, unless quiet: what is selected, or happens next."""
    if not os.environ.get(QUIET):
        show(line)


def _print(console: LenientConsole, text: str) -> None:
    console.print(wrapped(text, console.width) if console.is_terminal else text, markup=False)


def emit(text: str, end: str = "\n") -> None:
    """Print machine-readable text to standard output verbatim."""
    out.file.write(f"{text}{end}")
    out.file.flush()


def show_json(value: object) -> None:
    """Print the output of `--json`."""
    emit(json.dumps(value, indent=2))


def note(*lines: str) -> None:
    """Print lines to standard error, wrapped as `say` does."""
    for line in lines:
        _print(err, one_line(line))


REPORTER = Reporter(result=say, note=partial(info, show=note), info=info)


def print_error(message: str) -> None:
    """Print an error to standard error in one line."""
    text = f"fsdpctl: {printable(' '.join(message.split())[:_LONGEST])}"
    shown = Text(wrapped(text, err.width) if err.is_terminal else text)
    shown.stylize("bold red", 0, len("fsdpctl:"))
    err.print(shown)


class _Column(NamedTuple):
    texts: list[str]  # the head and the cells
    is_right: bool  # right-aligned
    min_width: int  # width if the texts wrap at words
    max_width: int  # width without wrapping


def show_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()
) -> None:
    """Print a table to standard output, without empty columns.

    The columns in `right` are right-aligned. Cells may quote other files: they are printed
    verbatim. On a terminal, texts wrap at words. If the table is still too wide, the remaining
    columns follow below, with the first column repeated. Elsewhere, and for very many rows (rich
    would take minutes), lines have their full width. A table without column names has no head.
    """
    filled: list[_Column] = []
    for name, *cells in zip(head, *rows, strict=True):
        texts = [one_line(each) for each in (name, *cells)]
        filled_texts = [each for each in texts if each.strip() not in _NOTHING]
        if not set(filled_texts) & set(texts[1:]):
            continue  # no cell of this column is filled
        wraps = bool(filled) and any(each.count(" ") >= _FEW_WORDS for each in texts[1:])
        words = (x.split() if wraps or x == name else [x] for x in filled_texts)
        widths = (max(map(cell_len, each)) for each in (chain(*words), filled_texts))
        filled.append(_Column(texts, name in right, *widths))
    if out.is_terminal and filled and len(filled[0].texts) <= _MANY_ROWS:
        for number, part in enumerate(_parts(filled, out.width)):
            shown = _of_columns(part, out.width, has_head=any(head))
            out.print(*([""] if number else []), shown, sep="\n", soft_wrap=False, crop=False)
        return
    padded, start = [], 0 if any(head) else 1
    for each in filled:
        width = max(map(cell_len, each.texts))
        pairs = [(" " * (width - cell_len(text)), text) for text in each.texts[start:]]
        padded.append([a + b if each.is_right else b + a for a, b in pairs])
    emit("\n".join((" " * _GAP).join(row).rstrip() for row in zip(*padded, strict=True)))


def _parts(columns: Sequence[_Column], width: int) -> Iterator[list[_Column]]:
    """Divide columns into parts that fit into `width`; each part begins with the first column."""
    first, *rest = columns
    part, used = [first], first.min_width
    for column in rest:
        more = column.min_width + _GAP
        if len(part) > 1 and used + more > width:
            yield part
            part, used = [first], first.min_width
        part.append(column)
        used += more
    yield part


def _of_columns(columns: Sequence[_Column], width: int, *, has_head: bool) -> Table:
    widths = [each.min_width for each in columns]
    free = width - sum(widths) - _GAP * (len(columns) - 1)
    # Widen the most wrapped column.
    while free > 0 and widths != [each.max_width for each in columns]:
        lacking = max(range(len(widths)), key=lambda each: columns[each].max_width - widths[each])
        more = min(free, max(1, (columns[lacking].max_width - widths[lacking]) // 4))
        widths[lacking], free = widths[lacking] + more, free - more
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=has_head)
    for column, column_width in zip(columns, widths, strict=True):
        justify: Literal["left", "right"] = "right" if column.is_right else "left"
        table.add_column(Text(column.texts[0]), justify=justify, width=column_width)
    if not has_head:
        table.columns[0].style = "bold"
    for row in zip(*(column.texts[1:] for column in columns), strict=True):
        table.add_row(*map(Text, row))
    return table


def show_panel(title: str, lines: list[str]) -> None:
    """Print a boxed report of a failure to standard error."""
    text, head = Text(printable("\n".join(lines))), Text(title)
    panel = Panel(text, title=head, title_align="left", border_style="red")
    LenientConsole(highlight=False, stderr=True).print(panel)
