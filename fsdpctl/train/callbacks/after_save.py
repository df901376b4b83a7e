"""The user's command for each checkpoint: in order, one at a time, while training continues."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpctl.config.sealed import MANIFEST
from fsdpctl.errors import UsageError
from fsdpctl.io.files import last_line, open_own

LOG = "after-save.log"
_REPORT_INTERVAL = 10.0  # seconds
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


@dataclass(frozen=True, slots=True)
class HookMessage:
    """The outcome of the command for one checkpoint."""

    step: int
    outcome: str  # done, failed, timed out
    seconds: float = 0.0
    message: str = ""  # the cause, unless it is done

    @property
    def line(self) -> str:
        """The message to print, if any."""
        return f"step {self.step}: {self.message}" if self.message else ""

    def to_line(self) -> dict[str, Any]:
        """Return the object for metrics.jsonl."""
        line = {
            "step": self.step,
            "after_save": self.outcome,
            "after_save_seconds": round(self.seconds, 6),
        }
        return {**line, "warning": self.message} if self.message else line


class AfterSave:
    """The threads that run the command on complete checkpoints, each after the one before.

    The checkpoint `busy` that the command runs on must not be deleted: hold `deleting` to delete
    others. One whose turn is still to come may be, so that a hung command cannot fill the disk.
    """

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
        self.deleting = threading.Lock()
        self.busy: Path | None = None
        self._words, self._timeout, self._log = list(words), timeout, logs / LOG
        self._report = report
        self._newest: threading.Thread | None = None
        self._until = math.inf  # when commands must have ended

    def add(self, folder: Path, step: int, then: Callable[[], None]) -> None:
        """Run the command on a checkpoint after those before it; `then()` is called afterwards."""
        if self._words:
            given = (folder.absolute(), step, then, self._newest)
            # It lives as long as the command, which the kernel ties to it.
            self._newest = threading.Thread(
                target=self._work, args=given, name="after save", daemon=True
            )
            self._newest.start()

    def wait(self, say: Callable[[str], None]) -> None:
        """Wait for the commands, at most as long as one may take.

        Those that could not start by then fail. `say` is called regularly with a message.
        """
        thread, began = self._newest, time.monotonic()
        self._until = began + self._timeout
        while thread is not None and time.monotonic() < self._until + 3 * _GRACE_SECONDS:
            thread.join(_REPORT_INTERVAL)
            if not thread.is_alive():
                return
            say(f"waiting for checkpoint.after_save: {time.monotonic() - began:.0f} s so far")

    def _work(
        self,
        folder: Path,
        step: int,
        then: Callable[[], None],
        before: threading.Thread | None,
    ) -> None:
        if before is not None:
            before.join()
        with self.deleting:
            self.busy = folder
        message = self._run(folder, step)
        with self.deleting, suppress(OSError):
            self.busy = None
            then()
        self._report(message)

    def _run(self, folder: Path, step: int) -> HookMessage:
        began = time.monotonic()
        if not (folder / MANIFEST).exists():
            return _failed(step, "failed", 0.0, "checkpoint deleted before its turn")
        if began >= self._until:
            return _failed(step, "failed", 0.0, "not started in time")
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
            return _failed(step, "failed", 0.0, f"cannot be started: {error.strerror}")
        try:
            code = process.wait(min(self._timeout, self._until - began))
        except subprocess.TimeoutExpired:
            _end(process)
            seconds = time.monotonic() - began
            return _failed(step, "timed out", seconds, f"ended after {seconds:.0f} s")
        seconds = time.monotonic() - began
        if code == 0:
            return HookMessage(step, "done", seconds)
        status = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return _failed(step, "failed", seconds, status + self._last_line(printed))

    def _last_line(self, printed: int) -> str:
        """Return the last line of the output that begins at `printed`, and the log file."""
        try:
            last = last_line(self._log, printed)
        except (OSError, UsageError):
            return ""
        return f": {last} ({self._log})" if last else ""


def _failed(step: int, outcome: str, seconds: float, why: str) -> HookMessage:
    return HookMessage(step, outcome, seconds, f"checkpoint.after_save: {why}")


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
