"""The exceptions of fsdpctl, each with the exit code that the command line ends with.

SignalError, which ends a command that got a signal, has the codes of StoppedError and
InterruptError. It derives from BaseException.
"""

import difflib
import errno
import signal
from collections.abc import Iterable, Sequence
from enum import IntEnum

# Signals that request a run to save and stop.
STOP_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT
)  # fmt: skip
REMOVED_DURING_RUN = (
    "deleted or moved during the run"  # in the message about a run directory or metrics.jsonl
)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # of an OSError: of a disk, or of what is allowed there


class ExitCode(IntEnum):
    """How the command line or a rank ends; a rank's may also be a signal, as a negative number."""

    FAILED = 1
    USAGE = 2  # what the user typed or configured cannot work
    INSUFFICIENT = 3  # a run lacks memory by its estimate, or an export what a server needs
    CORRUPTED = 4  # a checkpoint is damaged or incomplete
    STOPPED = 75  # on request, after saving what there was
    NON_FINITE = 76  # a loss or gradient was not finite, or a spike
    SELF_CHECK = 77  # the first step was not what the configuration says
    INTERRUPT = 130  # Ctrl-C


# Of ranks: a restart would not help, or was not wanted; and the message needs no panel.
NO_RESTART = (
    ExitCode.USAGE, ExitCode.CORRUPTED, ExitCode.STOPPED, ExitCode.NON_FINITE, ExitCode.SELF_CHECK
)  # fmt: skip


class FsdpctlError(Exception):
    """Root of all errors that fsdpctl raises on purpose; each of `args` is a line for the user."""

    exit_code = ExitCode.FAILED

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class UsageError(FsdpctlError):
    """The command line or the configuration is invalid."""

    exit_code = ExitCode.USAGE


class DoesNotFitError(FsdpctlError):
    """The estimated memory of a run exceeds what its ranks or nodes have."""

    exit_code = ExitCode.INSUFFICIENT


class IncompleteExportError(FsdpctlError):
    """An export lacks what was trained, or what a server needs."""

    exit_code = ExitCode.INSUFFICIENT


class CheckpointError(FsdpctlError):
    """A checkpoint is corrupted, incomplete, or not in fsdpctl's format."""

    exit_code = ExitCode.CORRUPTED


class StoppedError(FsdpctlError):
    """The run stopped on request, after saving."""

    exit_code = ExitCode.STOPPED


class NonFiniteError(FsdpctlError):
    """A loss or gradient was infinite, not a number, or far above the previous ones."""

    exit_code = ExitCode.NON_FINITE


class SelfCheckError(FsdpctlError):
    """The first step of a start was not what the configuration says."""

    exit_code = ExitCode.SELF_CHECK


class InterruptError(FsdpctlError):
    """The user pressed Ctrl-C."""

    exit_code = ExitCode.INTERRUPT


class SignalError(BaseException):
    """A signal ends the command.

    It derives from BaseException, so code that catches every Exception of a library lets it pass.
    """

    def __init__(self, number: int) -> None:
        is_interrupt = number == signal.SIGINT
        super().__init__("interrupted" if is_interrupt else "stopped")
        self.exit_code = (InterruptError if is_interrupt else StoppedError).exit_code


class EngineError(FsdpctlError):
    """The sharded model was called in an order or with values that it cannot serve."""


class ModuleError(EngineError):
    """The module is or does what a sharded one cannot."""

    exit_code = ExitCode.USAGE


def shorten_list(names: Sequence[str], most: int = 5) -> str:
    """List `names`, at most `most` of them, with the number of the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known word closest to `word`, else an empty string."""
    word, names = word.lower(), {each.lower(): each for each in known}
    # What was typed in part, or too far, is nearer than what only looks like it.
    close = sorted(
        (
            each
            for each in names
            if min(len(word), len(each)) > 2 and (each.startswith(word) or word.startswith(each))
        ),
        key=lambda each: abs(len(each) - len(word)),
    )
    close = close or difflib.get_close_matches(word, names, n=1)
    return f"; did you mean {names[close[0]]}?" if close else ""
