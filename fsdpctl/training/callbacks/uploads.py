"""Upload of complete checkpoints, one after the other in a thread, while training continues."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from fsdpctl.checkpoint.folders import remove_old
from fsdpctl.checkpoint.remote_run import KEY, RemoteCheckpoints
from fsdpctl.config.training import CheckpointConfig
from fsdpctl.errors import CheckpointError, FsdpctlError
from fsdpctl.io.run_files import CHECKPOINTS, MANIFEST

_REPORT_INTERVAL = 10.0  # seconds


@dataclass(frozen=True, slots=True)
class UploadOutcome:
    """The outcome of the upload of a checkpoint."""

    step: int
    seconds: float = 0.0
    message: str = ""  # what went wrong, after its setting
    has_failed: bool = False


class Uploads:
    """The thread that uploads complete checkpoints, if the run has an object store.

    The checkpoint `busy` that it works on is not deleted. One whose turn is still to come may be,
    so that a hanging upload cannot fill the disk.
    """

    def __init__(
        self,
        keep: CheckpointConfig,
        run_dir: Path,
        report: Callable[[UploadOutcome], None],
        remote: RemoteCheckpoints | None,
    ) -> None:
        """Prepare to upload to `remote`, if any; a thread calls `report`."""
        self._keep, self._run_dir, self._report, self._remote = keep, run_dir, report, remote
        self._deleting = Lock()
        self.busy: Path | None = None
        self.best = ""  # the name of the checkpoint to keep for its validation loss
        self._latest = 0  # step that was added
        self._thread = ThreadPoolExecutor(1, "uploads")
        self._last: Future[None] | None = None
        self.seconds = 0.0  # of the newest upload
        self._newest: UploadOutcome | None = None

    def add(self, folder: Path, step: int) -> None:
        if self._remote is not None:
            self._latest = step
            self._last = self._thread.submit(self._work, self._remote, folder.absolute(), step)

    def remove_old(self) -> None:
        with self._deleting:
            busy = "" if self.busy is None else self.busy.name
            remove_old(self._run_dir / CHECKPOINTS, self._keep, (busy, self.best))

    def wait(self, say: Callable[[str], None]) -> None:
        """Wait for uploads, and `say` how long."""
        began = time.monotonic()
        while self._last is not None and not wait([self._last], _REPORT_INTERVAL).done:
            say(f"waiting for {KEY}: {time.monotonic() - began:.0f} s so far")

    def check(self) -> None:
        """Check that the newest checkpoint is in the store; CheckpointError if it isn't."""
        newest = self._newest
        if newest is not None and newest.has_failed:
            raise CheckpointError(f"step {newest.step}: {newest.message}; to retry, run it again")

    def _work(self, remote: RemoteCheckpoints, folder: Path, step: int) -> None:
        with self._deleting:
            self.busy = folder
        self._newest = self._uploaded(remote, folder, step)
        self._report(self._newest)
        with self._deleting:
            self.busy = None
        with suppress(OSError):
            self.remove_old()

    def _uploaded(self, remote: RemoteCheckpoints, folder: Path, step: int) -> UploadOutcome:
        every, began = self._keep.keep_every, time.monotonic()
        is_kept = not self._keep.keep_last or (every and step % every == 0)
        is_kept = is_kept or folder.name == self.best
        if step < self._latest and not is_kept:  # a slow store gets the newest
            return UploadOutcome(step)
        if not (folder / MANIFEST).exists():
            why = f"{KEY}: checkpoint deleted before its turn"
            return UploadOutcome(step, message=why, has_failed=True)
        try:
            remote.upload(folder)
        except Exception as error:  # training continues, whatever it is
            why = f"{KEY}: not uploaded: {error}; the checkpoint is in {folder}"
            return UploadOutcome(step, time.monotonic() - began, why, has_failed=True)
        finally:
            self.seconds = time.monotonic() - began
        why = ""
        try:
            remote.remove_old(self._keep, folder)
        except FsdpctlError as error:
            why = f"{KEY}: uploaded, but old checkpoints remain: {error}"
        return UploadOutcome(step, self.seconds, why)
