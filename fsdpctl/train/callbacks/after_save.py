"""The user's command for each checkpoint: in order, one at a time, while training continues."""

import os
import queue
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
    outcome: str  # done, failed, timed out, skipped
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


@dataclass(frozen=True, slots=True)
class _Job:
    folder: Path
    step: int
    then: Callable[[], None]


class AfterSave:
    """The thread that runs the command on complete checkpoints.

    The checkpoint `busy` that the command runs on must not be deleted: hold `deleting` to delete
    others. A queued checkpoint may be deleted, so that a hung command cannot fill the disk; the
    command is then skipped for it.
    """

    def __init__(
        self,
        words: Sequence[str],
        timeout: float,
        logs: Path,
        report: Callable[[HookMessage], None],
    ) -> None:
        """Prepare to run the program and arguments `words`, none if empty.

        `logs` is an existing directory for its output; `report` is called in the thread.
        """
        self.deleting = threading.Lock()
        self.busy: Path | None = None
        self._words, self._timeout, self._log = list(words), timeout, logs / LOG
        self._report = report
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_left = 0
        self._has_thread = False
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = False  # the run no longer waits

    def add(self, folder: Path, step: int, then: Callable[[], None]) -> None:
        """Queue a checkpoint; `then()` is called after the command."""
        if not self._words:
            return
        with self._changed:
            self._num_left += 1
        self._jobs.put(_Job(folder.absolute(), step, then))
        if not self._has_thread:  # it must outlive the command, which the kernel ties to it
            self._has_thread = True
            threading.Thread(target=self._work, name="after save", daemon=True).start()

    def wait(self, say: Callable[[str], None]) -> None:
        """Wait until the queue is empty, at most as long as one command may take.

        The rest is then ended or skipped. `say` is called regularly with a message.
        """
        began = time.monotonic()
        waited = 0.0
        while waited < self._timeout + 2 * _GRACE_SECONDS:
            patience = min(_REPORT_INTERVAL, max(0.1, self._timeout - waited))
            with self._changed:
                if self._changed.wait_for(lambda: self._num_left == 0, patience):
                    return
                left = self._num_left
            waited = time.monotonic() - began
            if waited < self._timeout:
                say(f"waiting for checkpoint.after_save: {left} left, {waited:.0f} s so far")
            elif not self._is_over:
                self._is_over = True
                _end(self._process)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            with self.deleting:
                exists = (job.folder / MANIFEST).exists()
                self.busy = job.folder
            message = self._run(job) if exists and not self._is_over else self._skipped(job)
            with self.deleting, suppress(OSError):
                self.busy = None
                job.then()
            self._report(message)
            with self._changed:
                self._num_left -= 1
                self._changed.notify_all()

    def _run(self, job: _Job) -> HookMessage:
        began = time.monotonic()
        try:
            with open_own(self._log, "ab", folders=1) as log:
                log.write(f"step {job.step}:\n".encode())
                log.flush()
                printed = log.tell()
                self._process = process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _TIED, *self._words, str(job.folder)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    env=_environment(os.environ, job), start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            return self._failed(job, "failed", 0.0, f"cannot be started: {error.strerror}")
        if self._is_over:  # meanwhile: `wait` did not know this process
            _end(process)
        try:
            code = process.wait(self._timeout)
            is_late = self._is_over and code != 0
        except subprocess.TimeoutExpired:
            is_late = True
            code = _end(process)
        self._process = None
        seconds = time.monotonic() - began
        if is_late:
            return self._failed(job, "timed out", seconds, f"ended after {seconds:.0f} s")
        if code == 0:
            return HookMessage(job.step, "done", seconds)
        status = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return self._failed(job, "failed", seconds, status + self._last_line(printed))

    def _skipped(self, job: _Job) -> HookMessage:
        why = "checkpoint deleted before its turn" if not self._is_over else "not started in time"
        return self._failed(job, "skipped", 0.0, why)

    def _failed(self, job: _Job, outcome: str, seconds: float, why: str) -> HookMessage:
        return HookMessage(job.step, outcome, seconds, f"checkpoint.after_save: {why}")

    def _last_line(self, printed: int) -> str:
        """Return the last line of the output that begins at `printed`, and the log file."""
        try:
            last = last_line(self._log, printed)
        except (OSError, UsageError):
            return ""
        return f": {last} ({self._log})" if last else ""


def _environment(variables: Mapping[str, str], job: _Job) -> dict[str, str]:
    kept = {
        name: text
        for name, text in variables.items()
        if name not in _RANK_VARIABLES and not name.startswith(("TORCHELASTIC_", "FSDPCTL_"))
    }
    return {**kept, "FSDPCTL_CHECKPOINT": str(job.folder), "FSDPCTL_STEP": str(job.step)}


def _end(process: "subprocess.Popen[bytes] | None") -> int:
    """End a command and its children by SIGTERM, then SIGKILL; return its exit code."""
    if process is None:
        return 0
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_GRACE_SECONDS)
    return -signal.SIGKILL
