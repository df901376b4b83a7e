"""Writes the checkpoints of a run, in the background if configured."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fsdpctl.checkpoint.base import Ranks
from fsdpctl.checkpoint.folders import LATEST, point_to, remove_old, step_folder
from fsdpctl.checkpoint.manifest import BaseInfo, Progress
from fsdpctl.checkpoint.publish import About
from fsdpctl.checkpoint.save import Snapshot, rank_pieces, take_snapshot, write_checkpoint
from fsdpctl.checkpoint.tensors import Staging
from fsdpctl.comm.rank_status import RANK_STATUS
from fsdpctl.config.model_path import CHECKPOINTS
from fsdpctl.config.schema import Config
from fsdpctl.config.serialize import words_for_others
from fsdpctl.io.activity import doing
from fsdpctl.run.assets import read_run_assets
from fsdpctl.train.callbacks.background import OnEachSave
from fsdpctl.train.step import Optimizer, TrainedModel

_POLL_SECONDS = 0.5
_OTHERS_SECONDS = 1800.0  # that other ranks may take longer to write than this one
_LEAVING_SECONDS = 10.0  # that a failing run waits for a checkpoint without progress


class Save:
    """A checkpoint in progress or complete."""

    def __init__(self, step: int, num_bytes: int, began: float) -> None:
        self.step, self.num_bytes, self.began = step, num_bytes, began
        self.stall = self.seconds = 0.0  # that training waited for it; until it was complete
        self.note = ""  # a failure after it was complete, on rank 0
        self.written = 0
        self.is_over = False
        self.error: Exception | None = None

    def run(self, write: Callable[["Save"], None]) -> None:
        """Write it, in a thread."""
        try:
            write(self)
        except Exception as error:
            self.error = error
        self.seconds = time.perf_counter() - self.began
        self.is_over = True

    def advance(self, count: int) -> None:
        """Count written bytes."""
        self.written += count

    def to_line(self) -> dict[str, Any]:
        """Return the object for metrics.jsonl."""
        line = {
            "step": self.step,
            "checkpoint_seconds": round(self.stall, 6),
            "checkpoint_write_seconds": round(self.seconds, 6),
        }
        return {**line, "warning": f"saved, but {self.note}"} if self.note else line


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
        on_each_save: Sequence[OnEachSave] = (),
        base: BaseInfo | None = None,
    ) -> None:
        """Save into `run_dir`, without the weights that `base` has.

        A thread uses the collectives of `ranks` during training.
        """
        self._checkpoints = run_dir / CHECKPOINTS
        self._settings = words_for_others(config)
        self._keep = config.checkpoint
        self._ranks = ranks
        self._on_each_save = on_each_save
        self._base = base
        self._staging = Staging() if config.checkpoint.mode == "async" else None
        self._assets: Mapping[str, bytes] = read_run_assets(run_dir) if ranks.rank == 0 else {}
        self._current: Save | None = None
        self._thread: threading.Thread | None = None

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
        current = self._current = Save(progress.step, snapshot.num_bytes, began)

        def write(save: Save) -> None:
            self._write(snapshot, save)

        self._thread = threading.Thread(
            target=current.run, args=(write,), name="checkpoint", daemon=True
        )
        self._thread.start()
        if self._staging is None:
            self.wait()  # detects a checkpoint without progress
        current.stall = time.perf_counter() - began

    def _write(self, snapshot: Snapshot, save: Save) -> None:
        folder = step_folder(self._checkpoints, save.step)
        write_checkpoint(folder, snapshot, self._ranks, save.advance)
        if self._ranks.rank != 0:
            return
        try:
            point_to(self._checkpoints / LATEST, folder)
            self._remove_old()
        except OSError as error:  # only noted: nothing is lost
            save.note = f"{error.filename or self._checkpoints}: {error.strerror}"
        self.add(folder, save.step)

    def add(self, folder: Path, step: int) -> None:
        """Have a complete checkpoint worked on, after those before it."""
        for each in self._on_each_save:
            each.add(folder, step, self._remove_old)

    def _remove_old(self) -> None:
        """Remove old checkpoints; called again once one is no longer worked on."""
        with ExitStack() as stack:
            for each in self._on_each_save:
                stack.enter_context(each.deleting)
            busy = [each.busy.name for each in self._on_each_save if each.busy is not None]
            remove_old(self._checkpoints, self._keep, busy)

    def take_saved(self) -> Save | None:
        """Return the checkpoint that has become complete since the last call, if any.

        Raises:
            FsdpctlError: If it could not be written.
        """
        current = self._current
        if current is None or not current.is_over:
            return None
        self._current = None
        if current.error is not None:
            raise current.error
        return current

    @property
    def share_written(self) -> float | None:
        """The fraction written of this rank's part of the checkpoint in progress, if any."""
        current = self._current
        if current is None:
            return None
        return current.written / current.num_bytes if current.num_bytes else 1.0

    def wait(self) -> None:
        """Wait until the checkpoint in progress is complete; `take_saved` returns it."""
        thread = self._thread
        if thread is None:
            return
        since, shown = time.perf_counter(), 0.0
        with doing("waiting for the checkpoint", "%") as advance:
            while thread.is_alive():
                thread.join(_POLL_SECONDS)
                share = self.share_written or 0.0
                # A rank that has written its part may wait for others; without progress it hangs.
                if share != shown:
                    since = time.perf_counter()
                waits = share == 1 and time.perf_counter() - since < _OTHERS_SECONDS
                if waits or share != shown:
                    RANK_STATUS.at("saving")
                advance(int(100 * share) - int(100 * shown))
                shown = share

    def close(self) -> None:
        """Let the checkpoint in progress complete as long as it advances."""
        current, thread = self._current, self._thread
        if current is None or thread is None:
            return
        written, since = current.written, time.perf_counter()
        while thread.is_alive() and time.perf_counter() - since < _LEAVING_SECONDS:
            thread.join(_POLL_SECONDS)
            if current.written != written:
                RANK_STATUS.at("completing a checkpoint")
                written, since = current.written, time.perf_counter()
