"""The user's command that is run on each checkpoint: in order, one at a time, beside training."""

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

LOG = "after-save.log"
_TELLS_EVERY = 10.0  # seconds
_GRACE_SECONDS = 5.0  # between being asked to end and being killed
_LAST_BYTES, _LONGEST = 4096, 300
# Has the kernel end the command when the rank that started it ends, however that ends.
_TIED = (
    "import ctypes, os, signal, sys\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
# A command that starts ranks, or refuses to beside others, would take them for its own.
_OF_THIS_RANK = frozenset(
    (
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
        "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
        "FSDPCTL_LAUNCHER",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Told:
    """How the command went on one checkpoint."""

    step: int
    outcome: str  # done, failed, timed out, passed over
    seconds: float = 0.0
    message: str = ""  # what is to be said, unless it is done

    def to_line(self) -> dict[str, Any]:
        """The object in metrics.jsonl."""
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
    """Runs a command on finished checkpoints, in a thread.

    The checkpoint that it runs on must not be deleted: who deletes holds `deleting`, and spares
    `busy`. One that waits for its turn may be, or a command that hangs would fill the disk; it is
    then passed over.
    """

    def __init__(self, words: Sequence[str], timeout: float, logs: Path) -> None:
        """Nothing is run before the first `add`.

        Args:
            words: the command; empty for none.
            timeout: seconds after which it is ended.
            logs: an existing folder, for what it prints.
        """
        self.deleting = threading.Lock()
        self.busy: Path | None = None
        self.tell: Callable[[Told], None] = lambda told: None  # called in the thread
        self._words, self._timeout, self._log = list(words), timeout, logs / LOG
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_left = 0
        self._has_thread = False
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = False  # nothing is waited for any more

    def add(self, folder: Path, step: int, then: Callable[[], None]) -> None:
        """Run it on a checkpoint when it is that one's turn, and call `then()` after that."""
        if not self._words:
            return
        with self._changed:
            self._num_left += 1
        self._jobs.put(_Job(folder.absolute(), step, then))
        if not self._has_thread:  # which lives as long as the process: the command is tied to it
            self._has_thread = True
            threading.Thread(target=self._work, name="after save", daemon=True).start()

    def wait(self, say: Callable[[str], None]) -> None:
        """Until it is done with all checkpoints, at most as long as one command may take.

        What is not done then is ended or passed over. `say` is told now and then.
        """
        began = time.monotonic()
        waited = 0.0
        while waited < self._timeout + 2 * _GRACE_SECONDS:
            patience = min(_TELLS_EVERY, max(0.1, self._timeout - waited))
            with self._changed:
                if self._changed.wait_for(lambda: self._num_left == 0, patience):
                    return
                left = self._num_left
            waited = time.monotonic() - began
            if waited < self._timeout:
                say(f"waiting for checkpoint.after_save: {left} to go, {waited:.0f} s so far")
            elif not self._is_over:
                self._is_over = True
                _end(self._process)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            with self.deleting:
                is_there = (job.folder / MANIFEST).exists()
                self.busy = job.folder
            told = self._run(job) if is_there and not self._is_over else self._passed_over(job)
            with self.deleting, suppress(OSError):
                self.busy = None
                job.then()
            self.tell(told)
            with self._changed:
                self._num_left -= 1
                self._changed.notify_all()

    def _run(self, job: _Job) -> Told:
        began = time.monotonic()
        try:
            with self._log.open("ab") as log:
                log.write(f"step {job.step}:\n".encode())
                log.flush()
                printed = log.tell()
                self._process = process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _TIED, *self._words, str(job.folder)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    env=_environment(os.environ, job), start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            return self._told(job, "failed", 0.0, f"cannot be started: {error.strerror}")
        if self._is_over:  # since it was looked at: nobody else knew this process
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
            return self._told(job, "timed out", seconds, f"ended after {seconds:.0f} s")
        if code == 0:
            return Told(job.step, "done", seconds)
        return self._told(job, "failed", seconds, _ended_with(code) + self._last_words(printed))

    def _passed_over(self, job: _Job) -> Told:
        why = "deleted before its turn" if not self._is_over else "its turn did not come in time"
        return self._told(job, "passed over", 0.0, why)

    def _told(self, job: _Job, outcome: str, seconds: float, why: str) -> Told:
        return Told(job.step, outcome, seconds, f"checkpoint.after_save: {why}")

    def _last_words(self, printed: int) -> str:
        """The last line of what it printed, which begins at `printed`, and where the rest is."""
        try:
            with self._log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(printed, size - _LAST_BYTES))
                lines = log.read(_LAST_BYTES).decode("utf-8", "replace").split("\n")
        except OSError:
            return ""
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {last[:_LONGEST]} ({self._log})" if last else ""


def _environment(variables: Mapping[str, str], job: _Job) -> dict[str, str]:
    kept = {
        name: text
        for name, text in variables.items()
        if name not in _OF_THIS_RANK and not name.startswith(("TORCHELASTIC_", "FSDPCTL_"))
    }
    return {**kept, "FSDPCTL_CHECKPOINT": str(job.folder), "FSDPCTL_STEP": str(job.step)}


def _end(process: "subprocess.Popen[bytes] | None") -> int:
    """End a command and what it started: ask for it, then kill; its exit code."""
    if process is None:
        return 0
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_GRACE_SECONDS)
    return -signal.SIGKILL


def _ended_with(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
