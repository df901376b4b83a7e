"""Printing of lines, tables and panels."""

import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal

from rich.cells import cell_len
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from fsdpctl.io.console import PatientConsole
from fsdpctl.io.texts import one_line, printable

_HEAD = 8  # characters of the subject of a line
_GAP, _FEW_WORDS = 2, 2  # between columns; blanks of a cell that is a name or a number, at most
_LONGEST = 2000  # characters of a message that quotes a rejected value

out = PatientConsole(highlight=False, soft_wrap=True)
err = PatientConsole(highlight=False, soft_wrap=True, stderr=True)


def say(line: str = "") -> None:
    """Print a line to standard output, wrapped at words if that is a terminal."""
    _print(out, printable(line))


def _print(console: PatientConsole, text: str) -> None:
    console.print(wrapped(text, console.width) if console.is_terminal else text, markup=False)


def wrapped(line: str, width: int) -> str:
    """Wrap a line at words, with the continuation below its text; several lines stay as they are.

    Names, paths and settings are not broken.
    """
    if len(line) <= width or "\n" in line:
        return line
    blanks = len(line) - len(line.lstrip())
    has_head = line[_HEAD - 1] == " " != line[_HEAD] and " " not in line[:_HEAD].rstrip()
    indent = " " * (_HEAD if has_head else blanks + 2)
    return "\n".join(
        textwrap.wrap(
            line, max(width, 2 * _HEAD), subsequent_indent=indent, break_long_words=False,
            break_on_hyphens=False, drop_whitespace=True, replace_whitespace=False,
        )
    )  # fmt: skip


def emit(text: str, end: str = "\n") -> None:
    """Print machine-readable text to standard output verbatim."""
    out.file.write(f"{text}{end}")
    out.file.flush()


def note(line: str) -> None:
    """Print a line to standard error, wrapped as `say` does."""
    _print(err, one_line(line))


def fail(message: str) -> None:
    """Print an error to standard error in one line."""
    text = f"fsdpctl: {printable(' '.join(message.split())[:_LONGEST])}"
    shown = Text(wrapped(text, err.width) if err.is_terminal else text)
    shown.stylize("bold red", 0, len("fsdpctl:"))
    err.print(shown)


def new_table(*columns: str, right: Collection[str] = ()) -> Table:
    """Return an empty table in the style of all commands; the columns `right` are aligned there."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        table.add_column(Text(one_line(column)), justify=justify)
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add a row of cells that may quote other files: their text is printed verbatim."""
    table.add_row(*(Text(one_line(cell)) for cell in cells))


def show_table(table: Table) -> None:
    """Print a table to standard output, without empty columns.

    On a terminal, texts wrap at words; if that is too little, the columns that are left follow
    below, with the first one repeated. Elsewhere, a table has its full width.
    """
    filled = [column for column in table.columns if _texts(column, header=False)]
    if filled:
        filled[0].no_wrap = True
    if not out.is_terminal:
        heads = [[str(each.header)] if table.show_header else [] for each in filled]
        cells = [map(str, each._cells) for each in filled]
        right = [number for number, each in enumerate(filled) if each.justify == "right"]
        show_columns([[*a, *b] for a, b in zip(heads, cells, strict=True)], right)
        return
    for number, part in enumerate(_parts(filled, out.width)):
        shown = _of_columns(part, table, out.width)
        out.print(*([""] if number else []), shown, sep="\n", soft_wrap=False, crop=False)


def show_columns(columns: Iterable[Sequence[str]], right: Collection[int] = ()) -> None:
    """Print columns of texts, the first of which are their heads, in their full width."""
    padded = []
    for number, column in enumerate(columns):
        texts = [one_line(each) for each in column]
        widths = [len(each) if each.isascii() else cell_len(each) for each in texts]
        widest = max(widths)
        blanks = [" " * (widest - each) for each in widths]
        pairs = zip(blanks, texts, strict=True)
        padded.append([a + b if number in right else b + a for a, b in pairs])
    emit("\n".join((" " * _GAP).join(row).rstrip() for row in zip(*padded, strict=True)))


def _texts(column: Column, *, header: bool = True) -> list[str]:
    """Return the cells of a column that are not empty, by default with its header."""
    cells = [column.header, *column._cells] if header else column._cells
    texts = [each.plain if isinstance(each, Text) else str(each) for each in cells]
    return [each for each in texts if each.strip() not in ("", "-")]


def _least(column: Column) -> int:
    """Return the width of a column whose texts are wrapped at words."""
    words = (
        word for text in _texts(column) for word in (text.split() if _wraps(column) else [text])
    )
    return max((cell_len(word) for word in words), default=0)


def _wraps(column: Column) -> bool:
    """Return whether a column has texts rather than names and numbers."""
    return not column.no_wrap and any(
        text.count(" ") >= _FEW_WORDS for text in _texts(column, header=False)
    )


def _parts(columns: Sequence[Column], width: int) -> Iterator[list[Column]]:
    """Divide columns so that each part fits into `width`; all have the first column."""
    if not columns:
        return
    first, rest = columns[0], columns[1:]
    part, used = [first], _least(first)
    for column in rest:
        more = _least(column) + _GAP
        if len(part) > 1 and used + more > width:
            yield part
            part, used = [first], _least(first)
        part.append(column)
        used += more
    yield part


def _of_columns(columns: Sequence[Column], like: Table, width: int) -> Table:
    wanted = [max(map(cell_len, _texts(column)), default=0) for column in columns]
    widths = [_least(column) for column in columns]
    free = width - sum(widths) - _GAP * (len(columns) - 1)
    while free > 0 and widths != wanted:  # the text that lacks most gets more
        lacking = max(range(len(widths)), key=lambda each: wanted[each] - widths[each])
        more = min(free, max(1, (wanted[lacking] - widths[lacking]) // 4))
        widths[lacking], free = widths[lacking] + more, free - more
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=like.show_header)
    for column, own in zip(columns, widths, strict=True):
        table.add_column(column.header, justify=column.justify, width=own)
    for row in zip(*(column._cells for column in columns), strict=True):
        table.add_row(*row)
    return table


def show_panel(title: str, lines: list[str]) -> None:
    """Print a boxed report of a failure to standard error."""
    PatientConsole(highlight=False, stderr=True).print(
        Panel(
            Text(printable("\n".join(lines))),
            title=Text(title),
            title_align="left",
            border_style="red",
        )
    )
