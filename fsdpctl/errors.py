"""The exceptions of fsdpctl, each with the exit code that the command line ends with.

FsdpctlError            1   something failed
├── UsageError          2   what the user typed or configured cannot work
├── DoesNotFitError     3   the estimated memory exceeds what there is
├── CheckpointError     4   a checkpoint is damaged or incomplete
├── StoppedError       75   stopped on request, after saving what there was
├── NonFiniteError     76   a loss or gradient was not finite, or a spike
├── SelfCheckError     77   the first step was not what the configuration says
├── InterruptError    130   stopped by Ctrl-C
└── EngineError         1   the sharded model was used in a way it cannot serve

SignalError, which ends a command that got a signal, has the codes of StoppedError and
InterruptError. It derives from BaseException.
"""

import difflib
import errno
import signal
from collections.abc import Iterable, Sequence

# Signals that request a run to save and stop.
STOP_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT
)  # fmt: skip
LOST = "deleted or moved during the run"  # in the message about a run directory or metrics.jsonl
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # of an OSError: of a disk, or of what is allowed there


class FsdpctlError(Exception):
    """Root of all errors that fsdpctl raises on purpose; the message is one line for the user."""

    exit_code = 1


class UsageError(FsdpctlError):
    """The command line or the configuration is invalid."""

    exit_code = 2


class DoesNotFitError(FsdpctlError):
    """The estimated memory of a run exceeds what its ranks or nodes have."""

    exit_code = 3


class CheckpointError(FsdpctlError):
    """A checkpoint is corrupted, incomplete, or not in fsdpctl's format."""

    exit_code = 4


class StoppedError(FsdpctlError):
    """The run stopped on request, after saving."""

    exit_code = 75


class NonFiniteError(FsdpctlError):
    """A loss or gradient was infinite, not a number, or far above the previous ones."""

    exit_code = 76


class SelfCheckError(FsdpctlError):
    """The first step of a start was not what the configuration says."""

    exit_code = 77


class InterruptError(FsdpctlError):
    """The user pressed Ctrl-C."""

    exit_code = 130


class SignalError(BaseException):
    """A signal ends the command.

    It derives from BaseException, so code that catches every Exception of a library lets it pass.
    """

    def __init__(self, number: int) -> None:
        """Describe the signal with this number."""
        is_interrupt = number == signal.SIGINT
        super().__init__("interrupted" if is_interrupt else "stopped")
        self.exit_code = (InterruptError if is_interrupt else StoppedError).exit_code


class EngineError(FsdpctlError):
    """The sharded model was called in an order or with values that it cannot serve."""


def first_of(names: Sequence[str], most: int = 5) -> str:
    """List `names`, at most `most` of them, with the number of the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known word closest to `word`, else an empty string."""
    known = list(known)
    # What was typed in part, or too far, is nearer than what only looks like it.
    close = sorted(
        (
            each
            for each in known
            if min(len(word), len(each)) > 2 and (each.startswith(word) or word.startswith(each))
        ),
        key=lambda each: abs(len(each) - len(word)),
    )
    close = close or difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
