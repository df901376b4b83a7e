"""What commands print with."""

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from fsdpctl.train.console import PatientConsole

out = PatientConsole(highlight=False, soft_wrap=True)
err = PatientConsole(highlight=False, soft_wrap=True, stderr=True)


def say(line: str = "") -> None:
    """Print a line to standard output, as it is."""
    out.print(line, markup=False)


def fail(message: str) -> None:
    """Print what went wrong, in one line, to standard error."""
    err.print(Text("fsdpctl: ", style="bold red") + Text(" ".join(message.split())))


def show_panel(title: str, lines: list[str]) -> None:
    """Print a boxed report of a failure to standard error."""
    Console(highlight=False, stderr=True).print(
        Panel(Text("\n".join(lines)), title=Text(title), title_align="left", border_style="red")
    )
