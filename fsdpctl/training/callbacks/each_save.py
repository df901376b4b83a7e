"""Work on each complete checkpoint while training continues: its upload, then the user's command.

One thread works on one checkpoint after the other.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from fsdpctl.checkpoint.folders import best_name, remove_old
from fsdpctl.checkpoint.remote_run import KEY, RemoteCheckpoints
from fsdpctl.config.training import CheckpointConfig
from fsdpctl.errors import CheckpointError, FsdpctlError, UsageError
from fsdpctl.io.files import last_line, open_own
from fsdpctl.io.run_files import CHECKPOINTS, LOGS, MANIFEST

LOG = "after-save.log"
UPLOAD, COMMAND = "upload", "after_save"  # names of values for loggers
_KEYS = {UPLOAD: KEY, COMMAND: "checkpoint.after_save"}
_REPORT_INTERVAL = 10.0  # seconds
_GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
# Has the kernel end the command when the rank that started it exits for whatever reason.
_TIED = (
    "import ctypes, os, signal, sys\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
# A command that itself starts ranks would take these variables for its own.
_RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """The outcome of the upload of a checkpoint, or of the command."""

    step: int
    name: str
    outcome: str  # done, failed, timed out, skipped
    seconds: float = 0.0
    why: str = ""  # the cause of a failure

    @property
    def message(self) -> str:
        """The cause of a failure, after its setting."""
        return f"{_KEYS[self.name]}: {self.why}" if self.why else ""

    def to_line(self) -> dict[str, Any]:
        return {"step": self.step, f"{self.name}_seconds": round(self.seconds, 6)}


class EachSave:
    """The thread that uploads complete checkpoints, and runs the user's command on them.

    The checkpoint `busy` that it works on is not deleted. One whose turn is still to come may be,
    so that hanging work cannot fill the disk.
    """

    def __init__(
        self,
        keep: CheckpointConfig,
        run_dir: Path,
        report: Callable[[SaveOutcome], None],
        *,
        remote: RemoteCheckpoints | None = None,
        words: Sequence[str] = (),
    ) -> None:
        """Prepare to upload to `remote` and to run `words`, if any; a thread calls `report`."""
        self._keep, self._run_dir, self._report = keep, run_dir, report
        self._remote, self._words = remote, words
        self._log = run_dir / LOGS / LOG
        self._deleting = Lock()
        self.busy: Path | None = None
        self._latest = 0  # step that was added
        self._thread = ThreadPoolExecutor(1, "each-save")
        self._last: Future[None] | None = None
        self._name = UPLOAD  # what it does
        self.upload_seconds = 0.0  # of the newest upload
        self._newest_upload: SaveOutcome | None = None
        self._ended = math.inf  # when training has ended
        self._late = 0.0  # seconds of commands since then

    def add(self, folder: Path, step: int, *, only_uploads: bool = False) -> None:
        words = [] if only_uploads else self._words
        if self._remote is not None or words:
            self._latest = step
            self._last = self._thread.submit(self._work, folder.absolute(), step, words)

    def remove_old(self) -> None:
        with self._deleting:
            busy = [] if self.busy is None else [self.busy.name]
            remove_old(self._run_dir / CHECKPOINTS, self._keep, busy)

    def wait(self, say: Callable[[str], None]) -> None:
        """Wait for uploads, and for commands at most for the time of one; `say` how long."""
        began = self._ended = time.monotonic()
        while self._last is not None and not wait([self._last], _REPORT_INTERVAL).done:
            say(f"waiting for {_KEYS[self._name]}: {time.monotonic() - began:.0f} s so far")

    def check_uploaded(self) -> None:
        """Check that the newest checkpoint is in the store; CheckpointError if it isn't."""
        newest = self._newest_upload
        if newest is not None and newest.outcome == "failed":
            raise CheckpointError(f"step {newest.step}: {newest.message}; to retry, run it again")

    def _work(self, folder: Path, step: int, words: Sequence[str]) -> None:
        with self._deleting:
            self.busy = folder
        if self._remote is not None:
            self._name = UPLOAD
            self._newest_upload = self._uploaded(self._remote, folder, step)
            self._report(self._newest_upload)
        if words:
            self._name = COMMAND
            self._report(self._commanded(words, folder, step))
        with self._deleting:
            self.busy = None
        with suppress(OSError):
            self.remove_old()

    def _uploaded(self, remote: RemoteCheckpoints, folder: Path, step: int) -> SaveOutcome:
        every, began = self._keep.keep_every, time.monotonic()
        is_kept = not self._keep.keep_last or (every and step % every == 0)
        is_best = self._keep.keep_best and best_name(folder) == folder.name
        if step < self._latest and not (is_kept or is_best):  # a slow store gets the newest
            return SaveOutcome(step, UPLOAD, "skipped")
        if not (folder / MANIFEST).exists():
            return SaveOutcome(step, UPLOAD, "failed", 0.0, "checkpoint deleted before its turn")
        try:
            remote.upload(folder)
        except Exception as error:  # training continues, whatever it is
            why = f"not uploaded: {error}; the checkpoint is in {folder}"
            return SaveOutcome(step, UPLOAD, "failed", time.monotonic() - began, why)
        finally:
            self.upload_seconds = time.monotonic() - began
        why = ""
        try:
            remote.remove_old(self._keep, folder)
        except FsdpctlError as error:
            why = f"uploaded, but old checkpoints remain: {error}"
        return SaveOutcome(step, UPLOAD, "done", self.upload_seconds, why)

    def _commanded(self, words: Sequence[str], folder: Path, step: int) -> SaveOutcome:
        began, left = time.monotonic(), self._keep.after_save_timeout - self._late
        if not (folder / MANIFEST).exists():
            return SaveOutcome(step, COMMAND, "failed", 0.0, "checkpoint deleted before its turn")
        if left <= 0:
            return SaveOutcome(step, COMMAND, "failed", 0.0, "not started in time")
        try:
            with open_own(self._log, "ab", folders=1) as log:
                log.write(f"step {step}:\n".encode())
                log.flush()
                printed = log.tell()
                process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _TIED, *words, str(folder)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    env=_environment(os.environ, folder, step), start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            return SaveOutcome(step, COMMAND, "failed", 0.0, f"cannot be started: {error.strerror}")
        outcome, why = "done", ""
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            _end(process)
            outcome, why = "timed out", f"ended after {time.monotonic() - began:.0f} s"
        else:
            if code:
                how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                outcome, why = "failed", how + self._last_line(printed)
        now = time.monotonic()
        self._late += max(0.0, now - max(began, self._ended))
        return SaveOutcome(step, COMMAND, outcome, now - began, why)

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
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
            return
