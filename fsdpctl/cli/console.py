"""What commands print with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

CONVERSATIONS = "conversations made into tokens"  # that are counted
_WIDEST = 400  # columns
_LONGEST = 2000  # characters of a message that quotes what it refuses

out = PatientConsole(highlight=False, soft_wrap=True)
err = PatientConsole(highlight=False, soft_wrap=True, stderr=True)


def say(line: str = "") -> None:
    """Print a line to standard output, as it is."""
    out.print(printable(line), markup=False)


def emit(text: str) -> None:
    """Print text for programs to standard output, to the letter."""
    out.file.write(f"{text}\n")
    out.file.flush()


def note(line: str) -> None:
    """Print a line to standard error, as it is."""
    err.print(printable(line), markup=False)


def fail(message: str) -> None:
    """Print what went wrong, in one line, to standard error."""
    err.print(
        Text("fsdpctl: ", style="bold red") + Text(printable(" ".join(message.split())[:_LONGEST]))
    )


def show_table(table: Table) -> None:
    """Print a table to standard output at its full width: cut names are of no use."""
    wide = PatientConsole(highlight=False, width=_WIDEST)
    wide.width = max(out.width, Measurement.get(wide, wide.options, table).maximum)
    wide.print(table)


@contextmanager
def bytes_bar(total: int) -> Iterator[Callable[[int], None]]:
    """A bar while the block runs; what it gives is told of the bytes that were done since."""
    columns = (BarColumn(bar_width=24), DownloadColumn(binary_units=True), TransferSpeedColumn())
    hidden = not err.is_terminal
    with Progress(*columns, console=err, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.update(task, advance=count)


@contextmanager
def count_of(what: str) -> Iterator[Callable[[int], None]]:
    """A count while the block runs, once there is something: it is told how many came since."""
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
