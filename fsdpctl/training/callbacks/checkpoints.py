"""Saves checkpoints at intervals, on request and at the end, in the background if configured."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

from fsdpctl.checkpoint.initial_weights import BaseWeights
from fsdpctl.checkpoint.publish import CheckpointMetadata
from fsdpctl.checkpoint.remote_checkpoints import (
    REMOTE_KEY,
    RemoteCheckpoints,
    remote_checkpoints_of,
)
from fsdpctl.checkpoint.run_checkpoints import (
    complete_checkpoints,
    remove_expired,
    replace_link,
    step_folder,
    step_of,
)
from fsdpctl.checkpoint.save import Snapshot, rank_pieces, take_snapshot, write_checkpoint
from fsdpctl.checkpoint.staging import StagingMemory
from fsdpctl.comm.mesh import ObjectExchange
from fsdpctl.comm.rank_status import FINISHING, STATUS_PAGE
from fsdpctl.config.schema import Config
from fsdpctl.config.serialize import to_settings
from fsdpctl.config.training import CheckpointConfig
from fsdpctl.errors import CheckpointError, FsdpctlError
from fsdpctl.io.activity import doing
from fsdpctl.io.run_files import BEST, CHECKPOINTS, LATEST, MANIFEST, SAVE
from fsdpctl.run.assets import read_run_assets
from fsdpctl.run.progress import format_seconds
from fsdpctl.training.journal import Journal
from fsdpctl.training.requests import RequestFlags
from fsdpctl.training.trainer import Callback, Trainer, ends_together

_SILENT_WAIT_SECONDS = 2.0  # a save prints a line if it waits longer for the base model
_REPORTED_SECONDS = 5.0  # a line is printed if a save takes longer
_POLL_SECONDS = 0.5
_SLOWEST_RANK_SECONDS = 1800.0  # other ranks may write for so long after this rank
_STALLED_SECONDS = 10.0  # a failing run waits for so long without progress of a save
_REPORT_INTERVAL = 10.0  # seconds


@dataclass(frozen=True, slots=True)
class UploadOutcome:
    """The outcome of the upload of a checkpoint."""

    step: int
    seconds: float = 0.0
    message: str = ""  # a problem, beginning with `checkpoint.remote=URL`
    has_failed: bool = False


class Uploads:
    """A thread that uploads complete checkpoints, if the run has an object store.

    The checkpoint that is `uploading` is not deleted. A queued checkpoint may be, so that a hanging
    upload cannot fill the disk.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        run_dir: Path,
        report: Callable[[UploadOutcome], None],
        remote: RemoteCheckpoints | None,
    ) -> None:
        """Prepare to upload to `remote`, if any; the thread calls `report` after each upload."""
        self._config, self._run_dir, self._report, self._remote = config, run_dir, report, remote
        self._deleting = Lock()
        self.uploading: Path | None = None
        self.best = ""  # the name of the checkpoint to keep for its validation loss
        self._latest_step = 0  # step of the last added checkpoint
        self._thread = ThreadPoolExecutor(1, "uploads")
        self._last_future: Future[None] | None = None
        self.seconds = 0.0  # duration of the newest upload
        self._newest_outcome: UploadOutcome | None = None

    def add(self, folder: Path, step: int) -> None:
        if self._remote is not None:
            self._latest_step = step
            args = self._remote, folder.absolute(), step
            self._last_future = self._thread.submit(self._work, *args)

    def remove_old(self) -> None:
        with self._deleting:
            uploading = "" if self.uploading is None else self.uploading.name
            remove_expired(self._run_dir / CHECKPOINTS, self._config, (uploading, self.best))

    def wait(self, say: Callable[[str], None]) -> None:
        """Wait for uploads, and report the waiting time to `say`."""
        began, last = time.monotonic(), self._last_future
        while last is not None and not wait([last], _REPORT_INTERVAL).done:
            say(f"waiting for {REMOTE_KEY}: {time.monotonic() - began:.0f} s so far")

    def check(self) -> None:
        """Raise CheckpointError if the upload of the newest checkpoint failed."""
        newest = self._newest_outcome
        if newest is not None and newest.has_failed:
            hint = "to retry, run the same command"
            raise CheckpointError(f"step {newest.step}: {newest.message}; {hint}")

    def _work(self, remote: RemoteCheckpoints, folder: Path, step: int) -> None:
        with self._deleting:
            self.uploading = folder
        self._newest_outcome = self._upload(remote, folder, step)
        self._report(self._newest_outcome)
        with self._deleting:
            self.uploading = None
        with suppress(OSError):
            self.remove_old()

    def _upload(self, remote: RemoteCheckpoints, folder: Path, step: int) -> UploadOutcome:
        keep_every, began = self._config.keep_every, time.monotonic()
        is_kept = not self._config.keep_last or (keep_every and step % keep_every == 0)
        is_kept = is_kept or folder.name == self.best
        # If the store is slow, skip checkpoints that newer ones would replace there.
        if step < self._latest_step and not is_kept:
            return UploadOutcome(step)
        if not (folder / MANIFEST).exists():
            problem = f"{REMOTE_KEY}: checkpoint deleted before its upload"
            return UploadOutcome(step, message=problem, has_failed=True)
        try:
            remote.upload(folder)
        except Exception as error:  # training continues after any error of a store
            problem = f"{REMOTE_KEY}: not uploaded: {error}; the checkpoint is in {folder}"
            return UploadOutcome(step, time.monotonic() - began, problem, has_failed=True)
        finally:
            self.seconds = time.monotonic() - began
        problem = ""
        try:
            remote.remove_expired(self._config, folder)
        except FsdpctlError as error:
            problem = f"{REMOTE_KEY}: uploaded, but old checkpoints remain: {error}"
        return UploadOutcome(step, self.seconds, problem)


@dataclass(slots=True)
class ByteTransfer:
    """A transfer that a thread makes: a save, or reading base weights to verify them."""

    step: int
    num_bytes: int
    began: float
    stall: float = 0.0  # seconds that training waited
    seconds: float = 0.0  # time until the checkpoint was complete
    num_done: int = 0  # bytes read or written
    note: str = ""  # rank 0: a failure after the checkpoint was complete
    future: Future[None] = field(default_factory=Future)

    def advance(self, count: int) -> None:
        self.num_done += count

    def to_line(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "checkpoint_seconds": round(self.stall, 6),
            "checkpoint_write_seconds": round(self.seconds, 6),
        }


class Checkpoints(Callback):
    """A callback that writes checkpoints, one at a time, on all ranks at the same steps.

    In the background mode, training waits only for a copy of this rank's part to host memory. A
    save waits until the previous one is complete.
    """

    saves_state = True

    def __init__(
        self,
        config: Config,
        ranks: ObjectExchange,
        journal: Journal,
        bases: Sequence[BaseWeights],
        *,
        uploads: bool,
    ) -> None:
        """Save as configured, and report to `journal`.

        A checkpoint leaves out the weights of a base whose path and checksums it records. A thread
        uses the collectives of `ranks` during training, and reads `bases` before the first save.
        If `uploads`, this rank uploads to the run's object store, if it has one.
        """
        settings, run_dir = config.checkpoint, journal.run_dir
        self._every, self._last = settings.every, config.train.steps
        self._keeps_best = settings.keep_best
        self._ranks, self._journal, self._bases = ranks, journal, bases
        self._base = next((each.record for each in bases if each.is_recorded), None)
        self._reading: ByteTransfer | None = None  # progress of reading the bases
        self._folder = run_dir / CHECKPOINTS
        self._settings = to_settings(config)
        self._staging = StagingMemory() if settings.mode == "async" else None
        self._assets: Mapping[str, bytes] = read_run_assets(run_dir) if ranks.rank == 0 else {}
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._current: ByteTransfer | None = None
        self._saved_step = -1
        self._lacks_links = False
        self._is_requested = False  # a save was; the file SAVE stays until it is complete
        remote = remote_checkpoints_of(config) if uploads else None
        self._uploads = Uploads(settings, run_dir, self._report, remote)

    def _report(self, outcome: UploadOutcome) -> None:
        self._journal.track({"step": outcome.step, "upload_seconds": round(outcome.seconds, 6)})
        if outcome.message:
            self._journal.warn(outcome.message, outcome.step)

    @property
    def fraction_written(self) -> float | None:
        """The written fraction of this rank's part of a checkpoint in progress, if any."""
        current = self._current
        if current is None:
            return None
        return current.num_done / current.num_bytes if current.num_bytes else 1.0

    @property
    def _bytes_moved(self) -> int:
        """The bytes that the thread has read and written."""
        return sum(each.num_done for each in (self._reading, self._current) if each is not None)

    def begin(self, trainer: Trainer) -> None:
        """Note the checkpoint from which the run resumes, if any; start verifying the bases."""
        if self._bases:
            self._reading = ByteTransfer(trainer.step, num_bytes=0, began=time.perf_counter())
            self._reading.future = self._writer.submit(self._verify, self._reading)
        self._saved_step = trainer.step if trainer.step else -1
        if self._keeps_best and trainer.best is not None:
            self._keep_best(trainer.best.step)
        for folder in complete_checkpoints(self._folder):  # their uploads may have been interrupted
            self._uploads.add(folder, step_of(folder))

    def prepare_save(self, trainer: Trainer) -> None:
        """Allocate pinned host memory for the copies of the first save, in a thread."""
        if self._staging is not None:
            parts, rank, has_base = trainer.parts, self._ranks.rank, self._base is not None
            pieces = rank_pieces(parts.model, parts.optimizer, rank, trained_only=has_base)
            self._staging.prepare([piece.values.detach() for piece in pieces])

    def is_due(self, step: int) -> bool:
        return step == self._last or (self._every > 0 and step % self._every == 0)

    def act(self, trainer: Trainer, requested: RequestFlags) -> RequestFlags:
        """Save if due or requested; before the run ends, wait until the checkpoint is complete."""
        if requested.stops or requested.save or trainer.has_due_work(self) or trainer.is_over():
            self.save(trainer, was_requested=requested.save)
        if requested.stops or trainer.is_over():
            self.complete_save(trainer)
        return requested

    def save(self, trainer: Trainer, *, was_requested: bool = False) -> None:
        """Save this step unless it is saved; FsdpctlError if the last save failed. Collective."""
        if self._saved_step != trainer.step:
            began, model = time.perf_counter(), trainer.parts.model
            self.complete_save(trainer)
            gc.collect()  # reference cycles must not hold memory that the copies need
            model.check_replicas()  # each replica writes a share of the checkpoint
            # The checkpoint leaves out the weights of a base, whose checksums the writer verifies.
            about = self._settings, self._assets, self._base
            metadata = CheckpointMetadata(trainer.progress(), *about)
            rank, optimizer = self._ranks.rank, trainer.parts.optimizer
            snapshot = take_snapshot(model, optimizer, rank, metadata, self._staging)
            save = self._current = ByteTransfer(trainer.step, snapshot.num_bytes, began)
            save.future = self._writer.submit(self._write, snapshot, save)
            if self._staging is None:
                self._wait(save)  # the watchdog kills the rank if the save makes no progress
            save.stall = time.perf_counter() - began
            self._saved_step = trainer.step
        if self._keeps_best and trainer.best is not None and trainer.best.step == trainer.step:
            self._writer.submit(self._keep_best, trainer.step)
        self._is_requested |= was_requested

    def _verify(self, reading: ByteTransfer) -> None:
        for each in self._bases:
            info = each.verify(self._ranks, reading.advance)
            self._base = info if each.is_recorded else self._base

    def _write(self, snapshot: Snapshot, save: ByteTransfer) -> None:
        if self._reading is not None:
            self._reading.future.result()  # raises the error
            snapshot = replace(snapshot, metadata=replace(snapshot.metadata, base=self._base))
        folder = step_folder(self._folder, save.step)
        write_checkpoint(folder, snapshot, self._ranks, save.advance)
        if self._ranks.rank == 0:
            try:
                self._link(LATEST, folder, save.step)
                self._uploads.remove_old()
            except OSError as error:  # only a note: the checkpoint is complete
                save.note = f"{error.filename or self._folder}: {error.strerror}"
            self._uploads.add(folder, save.step)
        save.seconds = time.perf_counter() - save.began

    def _keep_best(self, step: int) -> None:
        """Keep the checkpoint of a step. The main thread calls this only before the first save."""
        folder = step_folder(self._folder, step)
        if self._ranks.rank == 0 and folder in complete_checkpoints(self._folder):
            with suppress(OSError):  # if the disk is full, the next save reports it
                self._uploads.best = folder.name
                self._link(BEST, folder, step)
                self._uploads.remove_old()

    def _link(self, name: str, folder: Path, step: int) -> None:
        """Set a link to a checkpoint; only the first failure is printed: links are optional."""
        problem = replace_link(self._folder / name, folder)
        if problem and not self._lacks_links:
            self._lacks_links = True
            self._journal.warn(problem, step)

    def _wait(self, save: ByteTransfer) -> None:
        reading = self._reading
        if reading is not None and wait([reading.future], _SILENT_WAIT_SECONDS).not_done:
            cause = f"waiting for the checksum of base model {self._bases[-1].record.path}"
            self._journal.remark(f"step {save.step}: {cause}")
        since, shown, moved = time.perf_counter(), 0, self._bytes_moved
        with doing("waiting for the checkpoint", "%") as advance:
            while not wait([save.future], _POLL_SECONDS).done:
                fraction, before = self.fraction_written or 0.0, moved
                moved = self._bytes_moved
                if moved != before:
                    since = time.perf_counter()
                # A rank that has written its part may wait for other ranks, and so may every rank
                # while bases are read. Else, without a status, the watchdog detects a hang.
                may_wait = fraction == 1 or (reading is not None and not reading.future.done())
                waits = may_wait and time.perf_counter() - since < _SLOWEST_RANK_SECONDS
                if waits or moved != before:
                    STATUS_PAGE.at("saving")
                percent = int(100 * fraction)
                advance(percent - shown)
                shown = percent

    def complete_save(self, trainer: Trainer) -> None:
        """Wait until the checkpoint in progress is complete, and report it."""
        if self._current is not None:
            self._wait(self._current)
        self.idle(trainer)

    def idle(self, trainer: Trainer) -> None:
        """Report a checkpoint that has become complete, and remove the request for it.

        CheckpointError if a base has changed. It is raised early, so that few steps are lost.
        """
        if self._reading is not None and self._reading.future.done():
            self._reading.future.result()
        saved = self._current
        if saved is not None and saved.future.done():
            self._current = None
            try:
                saved.future.result()
            except FsdpctlError:
                self._journal.check_not_removed()  # a deleted run directory is the better message
                raise
            # The time limit includes the upload: a run that stops waits for it.
            trainer.requests.limit.add_save(saved.seconds + self._uploads.seconds)
            self._journal.record_save(saved.to_line(), saved.seconds)
            if saved.note:
                self._journal.warn(f"saved, but {saved.note}", saved.step)
            if saved.seconds > _REPORTED_SECONDS:
                self._journal.remark(f"step {saved.step}: saved in {format_seconds(saved.seconds)}")
        if self._is_requested and self._current is None:
            self._is_requested = False
            trainer.requests.clear(SAVE)

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Wait for uploads if all ranks end at the same step, and check them."""
        if ends_together(error):
            self._journal.check_not_removed()
            STATUS_PAGE.at(FINISHING)
            self._uploads.wait(self._journal.remark)
            if error is None:  # an earlier error is more important than a failed upload
                self._uploads.check()

    def finish_pending(self) -> None:
        """After a failure, let a checkpoint in progress complete as long as it makes progress."""
        current = self._current
        if current is None:
            return
        moved, since = self._bytes_moved, time.perf_counter()
        while time.perf_counter() - since < _STALLED_SECONDS:
            if wait([current.future], _POLL_SECONDS).done:
                return
            if self._bytes_moved != moved:
                STATUS_PAGE.at("completing a checkpoint")
                moved, since = self._bytes_moved, time.perf_counter()
