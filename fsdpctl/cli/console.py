"""Printing of lines, tables, panels and progress bars."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Literal

from rich.measure import Measurement
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from fsdpctl.io.console import PatientConsole, printable

CONVERSATIONS = "conversations tokenized"  # the unit of a count
_WIDEST = 400  # columns
_LONGEST = 2000  # characters of a message that quotes a rejected value

out = PatientConsole(highlight=False, soft_wrap=True)
err = PatientConsole(highlight=False, soft_wrap=True, stderr=True)


def say(line: str = "") -> None:
    """Print a line to standard output verbatim."""
    out.print(printable(line), markup=False)


def emit(text: str) -> None:
    """Print machine-readable text to standard output verbatim."""
    out.file.write(f"{text}\n")
    out.file.flush()


def note(line: str) -> None:
    """Print a line to standard error verbatim."""
    err.print(printable(line), markup=False)


def fail(message: str) -> None:
    """Print an error to standard error in one line."""
    err.print(
        Text("fsdpctl: ", style="bold red") + Text(printable(" ".join(message.split())[:_LONGEST]))
    )


def new_table(*columns: str, right: Collection[str] = ()) -> Table:
    """Return an empty table in the style of all commands; the columns `right` are aligned there."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        table.add_column(Text(printable(column)), justify=justify)
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add a row of cells that may quote other files: their text is printed verbatim."""
    table.add_row(*(Text(printable(cell)) for cell in cells))


def show_table(table: Table) -> None:
    """Print a table to standard output at its full width, so that no name is truncated."""
    wide = PatientConsole(highlight=False, width=_WIDEST)
    wide.width = max(out.width, Measurement.get(wide, wide.options, table).maximum)
    wide.print(table)


@contextmanager
def bytes_bar(total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar while the block runs; yield a function to add processed bytes to it."""
    columns = (BarColumn(bar_width=24), DownloadColumn(binary_units=True), TransferSpeedColumn())
    hidden = not err.is_terminal
    with Progress(*columns, console=err, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.update(task, advance=count)


@contextmanager
def count_of(what: str) -> Iterator[Callable[[int], None]]:
    """Show a count of `what` while the block runs; yield a function to add to it."""
    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} " + what), TimeElapsedColumn())
    hidden = not err.is_terminal
    with Progress(*columns, console=err, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=None, visible=False)
        yield lambda count: progress.update(task, advance=count, visible=True)


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
