"""The exceptions of fsdpctl, each with the exit code of the command line."""

import difflib
import errno
import signal
from collections.abc import Iterable, Sequence
from enum import IntEnum

# Signals that request a run to save and stop.
STOP_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT
)  # fmt: skip
# Part of the message if the run directory or metrics.jsonl is missing.
REMOVED_DURING_RUN = "deleted or moved during the run"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # error numbers of a full disk and an exceeded quota


class ExitCode(IntEnum):
    """The exit code of the command line or of a rank; a rank may also end by a signal (< 0)."""

    FAILED = 1
    USAGE = 2  # the command line or the configuration is invalid
    INSUFFICIENT = 3  # estimated memory exceeds the limit, or an export is incomplete
    CORRUPTED = 4  # a checkpoint is damaged or incomplete
    STOPPED = 75  # stopped on request, after saving
    NON_FINITE = 76  # a loss or gradient was not finite, or spiked
    SELF_CHECK = 77  # the first step did not do what the configuration says
    INTERRUPT = 130  # Ctrl-C


# After these exit codes of ranks, fsdpctl does not restart, and prints only the message.
NO_RESTART = (
    ExitCode.USAGE, ExitCode.CORRUPTED, ExitCode.STOPPED, ExitCode.NON_FINITE, ExitCode.SELF_CHECK
)  # fmt: skip


class FsdpctlError(Exception):
    """The base class of errors that fsdpctl raises; each of `args` is a line for the user."""

    exit_code = ExitCode.FAILED

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class UsageError(FsdpctlError):
    """The command line or the configuration is invalid."""

    exit_code = ExitCode.USAGE


class DoesNotFitError(FsdpctlError):
    """The estimated memory of a run exceeds the memory of its ranks or nodes."""

    exit_code = ExitCode.INSUFFICIENT


class IncompleteExportError(FsdpctlError):
    """An export lacks trained weights, or files that a server needs."""

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
    """The first step of a start did not do what the configuration says."""

    exit_code = ExitCode.SELF_CHECK


class InterruptError(FsdpctlError):
    """The user pressed Ctrl-C."""

    exit_code = ExitCode.INTERRUPT


class SignalError(BaseException):
    """A signal ends the command, with the exit code of StoppedError or InterruptError.

    SignalError derives from BaseException, so that `except Exception` does not catch it.
    """

    def __init__(self, number: int) -> None:
        is_interrupt = number == signal.SIGINT
        super().__init__("interrupted" if is_interrupt else "stopped")
        self.exit_code = (InterruptError if is_interrupt else StoppedError).exit_code


class EngineError(FsdpctlError):
    """The sharded model was called in an unsupported order or with unsupported values."""


class ModuleError(EngineError):
    """The module has a feature that a sharded module does not support."""

    exit_code = ExitCode.USAGE


def shorten_list(names: Sequence[str], most: int = 5) -> str:
    """List at most `most` names, and the number of the remaining names."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` with the known name closest to `word`, or an empty string."""
    word, names = word.lower(), {each.lower(): each for each in known}
    # A name with `word` as its beginning, or the reverse, is closer than a similar name.
    close = [x for x in names if x.startswith(word) or word.startswith(x)]
    close = [name for name in close if min(len(word), len(name)) > 2]
    close.sort(key=lambda name: abs(len(name) - len(word)))
    close = close or difflib.get_close_matches(word, names, n=1)
    return f"; did you mean {names[close[0]]}?" if close else ""
