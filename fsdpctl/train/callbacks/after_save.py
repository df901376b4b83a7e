"""The user's command for each checkpoint: in order, one at a time, while training continues."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fsdpctl.errors import UsageError
from fsdpctl.io.files import last_line, open_own
from fsdpctl.train.callbacks.background import HookMessage, OnEachSave

LOG = "after-save.log"
_GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
# Has the kernel end the command when the rank that started it exits for whatever reason.
_TIED = (
    "import ctypes, os, signal, sys\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
# A command that itself starts ranks would take these variables for its own.
_RANK_VARIABLES = frozenset(
    (
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
        "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
        "FSDPCTL_LAUNCHER",
    )
)  # fmt: skip


class AfterSave(OnEachSave):
    """The commands of a run."""

    name, key = "after_save", "checkpoint.after_save"

    def __init__(
        self,
        words: Sequence[str],
        timeout: float,
        logs: Path,
        report: Callable[[HookMessage], None],
    ) -> None:
        """Prepare to run the program and arguments `words`, none if empty.

        `logs` is an existing directory for its output; `report` is called in a thread.
        """
        super().__init__(report)
        self._words, self._timeout, self._log = list(words), timeout, logs / LOG
        self.waits = timeout + 3 * _GRACE_SECONDS

    @property
    def is_on(self) -> bool:
        """Whether there is a command."""
        return bool(self._words)

    def run(self, folder: Path, step: int) -> HookMessage:
        """Run the command, at most for its time."""
        began, until = time.monotonic(), self.until - 3 * _GRACE_SECONDS
        if began >= until:
            return self.failed(step, "failed", 0.0, "not started in time")
        try:
            with open_own(self._log, "ab", folders=1) as log:
                log.write(f"step {step}:\n".encode())
                log.flush()
                printed = log.tell()
                process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _TIED, *self._words, str(folder)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    env=_environment(os.environ, folder, step), start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            return self.failed(step, "failed", 0.0, f"cannot be started: {error.strerror}")
        try:
            code = process.wait(min(self._timeout, until - began))
        except subprocess.TimeoutExpired:
            _end(process)
            seconds = time.monotonic() - began
            return self.failed(step, "timed out", seconds, f"ended after {seconds:.0f} s")
        seconds = time.monotonic() - began
        if code == 0:
            return HookMessage(step, self.name, "done", seconds)
        status = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return self.failed(step, "failed", seconds, status + self._last_line(printed))

    def _last_line(self, printed: int) -> str:
        """Return the last line of the output that begins at `printed`, and the log file."""
        try:
            last = last_line(self._log, printed)
        except (OSError, UsageError):
            return ""
        return f": {last} ({self._log})" if last else ""


def _environment(variables: Mapping[str, str], folder: Path, step: int) -> dict[str, str]:
    kept = {
        name: text
        for name, text in variables.items()
        if name not in _RANK_VARIABLES and not name.startswith(("TORCHELASTIC_", "FSDPCTL_"))
    }
    return {**kept, "FSDPCTL_CHECKPOINT": str(folder), "FSDPCTL_STEP": str(step)}


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a command and its children by SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
            return
