"""Writes the checkpoints of a run, in the background if configured."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpctl.checkpoint.base import Ranks
from fsdpctl.checkpoint.folders import (
    LATEST,
    Retention,
    point_to,
    remove_old,
    step_folder,
)
from fsdpctl.checkpoint.manifest import BaseInfo, Progress
from fsdpctl.checkpoint.publish import About
from fsdpctl.checkpoint.save import (
    Snapshot,
    rank_pieces,
    take_snapshot,
    write_checkpoint,
)
from fsdpctl.checkpoint.tensors import Staging
from fsdpctl.comm.rank_status import RANK_STATUS
from fsdpctl.config.model_path import CHECKPOINTS
from fsdpctl.config.schema import Config
from fsdpctl.config.serialize import words_for_others
from fsdpctl.run.assets import read_run_assets
from fsdpctl.shards import TrainedModel
from fsdpctl.train.callbacks.after_save import AfterSave
from fsdpctl.train.parts import Optimizer

_POLL_SECONDS = 0.5
_OTHERS_SECONDS = 1800.0  # that other ranks may take longer to write than this one
_LEAVING_SECONDS = 10.0  # that a failing run waits for a checkpoint without progress


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint."""

    step: int
    stall: float  # seconds that training waited for it
    write: float  # seconds until it was complete
    note: str  # a failure after that, on rank 0

    def to_line(self) -> dict[str, Any]:
        """Return the object for metrics.jsonl."""
        line = {
            "step": self.step,
            "checkpoint_seconds": round(self.stall, 6),
            "checkpoint_write_seconds": round(self.write, 6),
        }
        return {**line, "warning": f"saved, but {self.note}"} if self.note else line


class _Write:
    """A checkpoint in progress."""

    def __init__(self, step: int, num_bytes: int, began: float) -> None:
        self.step, self.num_bytes, self.began = step, num_bytes, began
        self.stall = 0.0
        self.written = 0
        self.ended: float | None = None
        self.error: Exception | None = None
        self.thread: threading.Thread | None = None

    def run(self, write: Callable[[Callable[[int], None]], None]) -> None:
        try:
            write(self.advance)
        except Exception as error:
            self.error = error
        self.ended = time.perf_counter()

    def advance(self, count: int) -> None:
        self.written += count


class Saver:
    """The writer of a run's checkpoints, one at a time. All ranks call it at the same steps.

    In the background, a save costs the step a copy of this rank's part into host memory. A save
    waits until the previous one is complete.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        ranks: Ranks,
        after_save: AfterSave,
        base: BaseInfo | None = None,
    ) -> None:
        """Save into `run_dir`.

        Args:
            config: Resolved configuration.
            run_dir: Run directory.
            ranks: All ranks, with collectives that a thread may use during training.
            after_save: Runner of the user's command on rank 0.
            base: Model with the weights that are not trained and therefore not saved, if any.
        """
        self._checkpoints = run_dir / CHECKPOINTS
        self._settings = words_for_others(config)
        self._keep = Retention(config.checkpoint.keep_last, config.checkpoint.keep_every)
        self._ranks = ranks
        self._after_save = after_save
        self._base = base
        self._staging = Staging() if config.checkpoint.mode == "async" else None
        self._assets: Mapping[str, bytes] = read_run_assets(run_dir) if ranks.rank == 0 else {}
        self._current: _Write | None = None
        self._note = ""  # written by the thread about a complete checkpoint

    def prepare(self, model: TrainedModel, optimizer: Optimizer) -> None:
        """Allocate pinned host memory for the copies of the first save, in a thread."""
        if self._staging is not None:
            trained_only = self._base is not None
            pieces = rank_pieces(model, optimizer, self._ranks.rank, trained_only=trained_only)
            self._staging.prepare([each.values.detach() for each in pieces])

    def save(
        self, model: TrainedModel, optimizer: Optimizer, progress: Progress, began: float
    ) -> None:
        """Start to write a checkpoint, or write it in sync mode. Training has waited since `began`.

        The previous checkpoint must have been taken by `take_saved`.

        Raises:
            FsdpctlError: If the replicas of the model differ.
        """
        assert self._current is None
        model.check_replicas()  # each replica writes a share of the checkpoint
        about = About(progress, self._settings, self._assets, self._base)
        snapshot = take_snapshot(model, optimizer, self._ranks.rank, about, self._staging)
        current = self._current = _Write(progress.step, snapshot.num_bytes, began)

        def write(on_bytes: Callable[[int], None]) -> None:
            self._write(snapshot, on_bytes)

        current.thread = threading.Thread(
            target=current.run, args=(write,), name="checkpoint", daemon=True
        )
        current.thread.start()
        if self._staging is None:
            self.wait()  # detects a checkpoint without progress
        current.stall = time.perf_counter() - began

    def _write(self, snapshot: Snapshot, on_bytes: Callable[[int], None]) -> None:
        folder = step_folder(self._checkpoints, snapshot.about.progress.step)
        write_checkpoint(folder, snapshot, self._ranks, on_bytes)
        if self._ranks.rank == 0:
            self._tidy(folder)
            step = snapshot.about.progress.step
            self._after_save.add(folder, step, self._remove_old)

    def _tidy(self, newest: Path) -> None:
        """Update `latest` and remove old checkpoints. A failure is only noted: nothing is lost."""
        try:
            point_to(self._checkpoints / LATEST, newest)
            with self._after_save.deleting:
                self._remove_old()
        except OSError as error:
            self._note = f"{error.filename or self._checkpoints}: {error.strerror}"

    def _remove_old(self) -> None:
        """Remove old checkpoints; called again once the command no longer needs one."""
        remove_old(self._checkpoints, self._keep, self._after_save.busy)

    def take_saved(self) -> Saved | None:
        """Return the checkpoint that has become complete since the last call, if any.

        Raises:
            FsdpctlError: If it could not be written.
        """
        current = self._current
        if current is None or current.ended is None:
            return None
        self._current = None
        if current.error is not None:
            raise current.error
        note, self._note = self._note, ""
        return Saved(current.step, current.stall, current.ended - current.began, note)

    @property
    def share_written(self) -> float | None:
        """The fraction written of this rank's part of the checkpoint in progress, if any."""
        current = self._current
        if current is None:
            return None
        return current.written / current.num_bytes if current.num_bytes else 1.0

    def wait(self, report: Callable[[float, float], None] = lambda share, seconds: None) -> None:
        """Wait until the checkpoint in progress is complete; `take_saved` returns it.

        `report` is called regularly with the fraction written and the seconds waited.
        """
        thread = None if self._current is None else self._current.thread
        began = since = time.perf_counter()
        shown: float | None = None
        while thread is not None and thread.is_alive():
            thread.join(_POLL_SECONDS)
            if thread.is_alive():
                # A rank that has written its part may wait for others; without progress it hangs.
                if self.share_written != shown:
                    since = time.perf_counter()
                waits = self.share_written == 1 and time.perf_counter() - since < _OTHERS_SECONDS
                if waits or self.share_written != shown:
                    RANK_STATUS.at("saving")
                shown = self.share_written
                report(self.share_written or 0.0, time.perf_counter() - began)

    def close(self) -> None:
        """Let the checkpoint in progress complete as long as it advances."""
        current = self._current
        if current is None or current.thread is None:
            return
        written, since = current.written, time.perf_counter()
        while current.thread.is_alive() and time.perf_counter() - since < _LEAVING_SECONDS:
            current.thread.join(_POLL_SECONDS)
            if current.written != written:
                RANK_STATUS.at("completing a checkpoint")
                written, since = current.written, time.perf_counter()
