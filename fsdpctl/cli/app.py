"""The command line: its commands, and the exit codes of errors."""

import contextlib
import signal
import sys
from collections.abc import Callable
from types import FrameType

import typer
from typer.core import TyperGroup

from fsdpctl import __version__
from fsdpctl.cli import console
from fsdpctl.cli.check_nodes import check_nodes
from fsdpctl.cli.checkpoint import consolidate_checkpoint, shard_checkpoint
from fsdpctl.cli.compare import compare, profile_device
from fsdpctl.cli.console import say
from fsdpctl.cli.data import data, tokenize
from fsdpctl.cli.estimate import estimate_memory
from fsdpctl.cli.inspection import inspect_checkpoint, verify_checkpoint
from fsdpctl.cli.listing import list_choices
from fsdpctl.cli.sample import evaluate, sample
from fsdpctl.cli.status import compare_runs, status
from fsdpctl.cli.train import train
from fsdpctl.errors import STOP_SIGNALS, FsdpctlError, InterruptError, StoppedError, UsageError


def print_version(wanted: bool) -> None:
    """Print versions and devices, and exit."""
    if not wanted:
        return
    import torch
    from torch.cuda import nccl

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
    cls=TyperGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train PyTorch models with fully sharded data parallelism.\n\n"
    "`fsdpctl train` needs no settings: it trains a small model on text from this machine.",
)

_SETTINGS = {"ignore_unknown_options": True}  # the configuration reports them
# Name, function, and whether it takes settings. Help shows the first 50 characters of docstrings.
_COMMANDS: tuple[tuple[str, Callable[..., None], bool], ...] = (
    ("train", train, True),
    ("estimate-memory", estimate_memory, True),
    ("status", status, False),
    ("check-nodes", check_nodes, True),
    ("compare", compare, True),
    ("profile-device", profile_device, True),
    ("compare-runs", compare_runs, False),
    ("sample", sample, False),
    ("evaluate", evaluate, True),
    ("consolidate-checkpoint", consolidate_checkpoint, False),
    ("shard-checkpoint", shard_checkpoint, False),
    ("inspect-checkpoint", inspect_checkpoint, False),
    ("verify-checkpoint", verify_checkpoint, False),
    ("tokenize", tokenize, False),
    ("data", data, False),
    ("list", list_choices, False),
)
for _name, _command, _takes_settings in _COMMANDS:
    app.command(_name, context_settings=_SETTINGS if _takes_settings else None)(_command)


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
        console.fail(str(error))
        sys.exit(error.exit_code)
    except _ParserError as error:
        console.fail(error.format_message() if hasattr(error, "format_message") else str(error))
        sys.exit(UsageError.exit_code)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        with contextlib.suppress(OSError):
            console.fail(f"{where}{error.strerror or error}")
        sys.exit(UsageError.exit_code)
