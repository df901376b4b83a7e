"""The command line: its commands, and the exit codes of errors."""

import contextlib
import signal
import sys
from importlib import import_module
from types import FrameType
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

from fsdpctl import __version__
from fsdpctl.errors import STOP_SIGNALS, FsdpctlError, InterruptError, StoppedError, UsageError


class CommandInfo(NamedTuple):
    """A command, whose module is imported when it runs or shows its own help."""

    module: str  # in fsdpctl.cli
    takes_settings: bool
    help: str  # at most 50 characters
    function: str = ""  # of the module; "": the command's name


COMMANDS = {
    "train": CommandInfo("train", True, "Train a model, or resume a run."),
    "estimate-memory": CommandInfo("estimate", True, "Estimate peak memory per rank before a run."),
    "status": CommandInfo("status", False, "Show the state and progress of a run."),
    "check-nodes": CommandInfo("check_nodes", True, "Check the nodes before a run on them."),
    "compare": CommandInfo("compare", True, "Compare variants by short runs or simulation."),
    "profile-device": CommandInfo(
        "compare", True, "Measure this machine for step-time predictions."
    ),
    "compare-runs": CommandInfo("status", False, "Show how two existing runs differ."),
    "convert": CommandInfo("convert", True, "Write a recipe from another tool's file."),
    "sample": CommandInfo("sample", False, "Generate text from a checkpoint or a model."),
    "evaluate": CommandInfo("sample", True, "Compute loss, perplexity and bits per byte."),
    "consolidate-checkpoint": CommandInfo(
        "checkpoint", False, "Export a checkpoint to Hugging Face, GGUF or PEFT."
    ),
    "shard-checkpoint": CommandInfo(
        "checkpoint", False, "Convert a Hugging Face model to a checkpoint."
    ),
    "inspect-checkpoint": CommandInfo(
        "inspection", False, "Show a checkpoint's run, files and tensors."
    ),
    "verify-checkpoint": CommandInfo(
        "inspection", False, "Verify all checksums of a checkpoint and its base."
    ),
    "tokenize": CommandInfo("data", False, "Tokenize text into a token file."),
    "data": CommandInfo("data", False, "Show the training samples of one step."),
    "list": CommandInfo("listing", False, "List settings, options and recipes.", "list_choices"),
}


class _Commands(TyperGroup):
    """The commands, each of which is imported when it is requested."""

    def __init__(self, **about: Any) -> None:
        """Create the group, which lists the commands and suggests them for unknown ones."""
        names: dict[str, Any] = dict.fromkeys(COMMANDS)
        super().__init__(**{**about, "commands": names})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return a command; None if it is unknown."""
        if (info := COMMANDS.get(cmd_name)) is None:
            return None
        alone = typer.Typer(rich_markup_mode=None, add_completion=False)
        settings = {"ignore_unknown_options": True} if info.takes_settings else None
        module = import_module(f"fsdpctl.cli.{info.module}")
        function = getattr(module, info.function or cmd_name.replace("-", "_"))
        alone.command(cmd_name, context_settings=settings)(function)
        return typer.main.get_command(alone)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the table of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, info.help) for name, info in COMMANDS.items()])


def print_version(wanted: bool) -> None:
    """Print versions and devices, and exit."""
    if not wanted:
        return
    import torch
    from torch.cuda import nccl

    from fsdpctl.cli.console import say

    say(f"fsdpctl {__version__}")
    say(f"python {sys.version.split()[0]}")
    say(f"torch {torch.__version__}")
    if torch.cuda.is_available():
        say(f"CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, nccl.version()))}")
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            say(f"device {index}: {about.name}, {about.total_memory / (1 << 30):.0f} GiB")
    else:
        say("devices: CPU only")
    raise typer.Exit


# Errors of the command line itself: click's class, which newer versions of typer include.
_ParserError: type[Exception] = typer.BadParameter.__mro__[2]


app = typer.Typer(
    name="fsdpctl",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train PyTorch models with fully sharded data parallelism.\n\n"
    "`fsdpctl train` needs no settings: it trains a small model on text from this machine.",
)


@app.callback()
def about(
    version: bool = typer.Option(
        False,
        "--version",
        help="Print the versions of fsdpctl, torch, CUDA and NCCL, and the devices.",
        callback=print_version,
        is_eager=True,
    ),
) -> None:
    """Define the options that belong to no command."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise InterruptError("interrupted")


def _stop(number: int, frame: FrameType | None) -> None:
    raise StoppedError("stopped")


def _fail(message: str) -> None:
    from fsdpctl.cli.console import fail  # takes a moment

    fail(message)


def main() -> None:
    """Run the command line. An error is printed in one line; its kind sets the exit code."""
    for number in STOP_SIGNALS:
        handler = _interrupt if number == signal.SIGINT else _stop
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, handler)
    args = sys.argv[1:] or ["--help"]
    try:
        code = app(args, standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except FsdpctlError as error:
        _fail(str(error))
        sys.exit(error.exit_code)
    except _ParserError as error:
        _fail(error.format_message() if hasattr(error, "format_message") else str(error))
        sys.exit(UsageError.exit_code)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        with contextlib.suppress(OSError):
            _fail(f"{where}{error.strerror or error}")
        sys.exit(UsageError.exit_code)
