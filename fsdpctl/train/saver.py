"""Saves a run's checkpoints, in the background where it can."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    Ranks,
    Snapshot,
    rank_pieces,
    take_snapshot,
    write_checkpoint,
)
from fsdpctl.checkpoint.tensors import Staging
from fsdpctl.comm.pulse import PULSE
from fsdpctl.config.model_path import CHECKPOINTS
from fsdpctl.config.schema import Config
from fsdpctl.config.serialize import words_for_others
from fsdpctl.run.assets import read_run_assets
from fsdpctl.shards import TrainedModel
from fsdpctl.train.after_save import AfterSave
from fsdpctl.train.parts import Optimizer

_TELLING_SECONDS = 0.5
_OTHERS_SECONDS = 1800.0  # that others may take longer to write than this rank
_LEAVING_SECONDS = 10.0  # what a failing run waits for a checkpoint that does not get on


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is complete."""

    step: int
    stall: float  # seconds that training stood still for it
    write: float  # seconds until it was complete
    note: str  # what went wrong after that, on rank 0

    def to_line(self) -> dict[str, Any]:
        """The object in metrics.jsonl."""
        line = {
            "step": self.step,
            "checkpoint_seconds": round(self.stall, 6),
            "checkpoint_write_seconds": round(self.write, 6),
        }
        return {**line, "warning": f"saved; but {self.note}"} if self.note else line


class _Write:
    """One checkpoint on its way to the disk."""

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
    """Writes checkpoints of one run, one at a time. All ranks call it at the same steps.

    In the background a step pays for the copy of this rank's part into host memory; a save that
    comes before the last one is complete waits for it.
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
            config: resolved.
            run_dir: of the run.
            ranks: all of them, talking apart from training, so that a thread may.
            after_save: on rank 0 what is run on each checkpoint.
            base: what has the weights that are not trained, which are then not saved.
        """
        self._checkpoints = run_dir / CHECKPOINTS
        self._words = words_for_others(config)
        self._keep = Retention(config.checkpoint.keep_last, config.checkpoint.keep_every)
        self._ranks = ranks
        self._after_save = after_save
        self._base = base
        self._staging = Staging() if config.checkpoint.mode == "async" else None
        self._assets: Mapping[str, bytes] = read_run_assets(run_dir) if ranks.rank == 0 else {}
        self._current: _Write | None = None
        self._note = ""  # of the thread, about a checkpoint that is complete

    def prepare(self, model: TrainedModel, optimizer: Optimizer) -> None:
        """Pin host memory for the copies of the first save, in a thread."""
        if self._staging is not None:
            trained_only = self._base is not None
            pieces = rank_pieces(model, optimizer, self._ranks.rank, trained_only=trained_only)
            self._staging.prepare([each.values.detach() for each in pieces])

    def save(
        self, model: TrainedModel, optimizer: Optimizer, progress: Progress, began: float
    ) -> None:
        """Begin to write a checkpoint, in sync mode end it too; training has waited since `began`.

        The one before must have been waited for and told of.

        Raises:
            FsdpctlError: copies of the model have come apart.
        """
        assert self._current is None
        model.check_replicas()  # each copy writes a share of the checkpoint
        about = About(progress, self._words, self._assets, self._base)
        snapshot = take_snapshot(model, optimizer, self._ranks.rank, about, self._staging)
        current = self._current = _Write(progress.step, snapshot.num_bytes, began)

        def write(on_bytes: Callable[[int], None]) -> None:
            self._write(snapshot, on_bytes)

        current.thread = threading.Thread(
            target=current.run, args=(write,), name="checkpoint", daemon=True
        )
        current.thread.start()
        if self._staging is None:
            self.wait()  # where it is seen whether it gets on
        current.stall = time.perf_counter() - began

    def _write(self, snapshot: Snapshot, on_bytes: Callable[[int], None]) -> None:
        folder = step_folder(self._checkpoints, snapshot.about.progress.step)
        write_checkpoint(folder, snapshot, self._ranks, on_bytes)
        if self._ranks.rank == 0:
            self._tidy(folder)
            step = snapshot.about.progress.step
            self._after_save.add(folder, step, self._remove_old)

    def _tidy(self, newest: Path) -> None:
        """Of what fails here nothing is lost: it is told."""
        try:
            point_to(self._checkpoints / LATEST, newest)
            with self._after_save.deleting:
                self._remove_old()
        except OSError as error:
            self._note = f"{error.filename or self._checkpoints}: {error.strerror}"

    def _remove_old(self) -> None:
        """Also once the command is done with one that was spared for it."""
        remove_old(self._checkpoints, self._keep, self._after_save.busy)

    def take_saved(self) -> Saved | None:
        """The checkpoint that has become complete since the last call, if one has.

        Raises:
            FsdpctlError: it could not be written.
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
        """Of this rank's part of the checkpoint on its way; None where there is none."""
        current = self._current
        if current is None:
            return None
        return current.written / current.num_bytes if current.num_bytes else 1.0

    def wait(self, tell: Callable[[float, float], None] = lambda share, seconds: None) -> None:
        """Until the checkpoint on its way is complete; `take_saved` tells of it.

        `tell` is called now and then, with the share of it that is written and the seconds waited.
        """
        thread = None if self._current is None else self._current.thread
        began = since = time.perf_counter()
        shown: float | None = None
        while thread is not None and thread.is_alive():
            thread.join(_TELLING_SECONDS)
            if thread.is_alive():
                # Who has written all waits for others, for a while; who gets nowhere is noticed.
                if self.share_written != shown:
                    since = time.perf_counter()
                waits = self.share_written == 1 and time.perf_counter() - since < _OTHERS_SECONDS
                if waits or self.share_written != shown:
                    PULSE.at("saving")
                shown = self.share_written
                tell(self.share_written or 0.0, time.perf_counter() - began)

    def close(self) -> None:
        """Let the checkpoint on its way be completed, as long as it gets on."""
        current = self._current
        if current is None or current.thread is None:
            return
        written, since = current.written, time.perf_counter()
        while current.thread.is_alive() and time.perf_counter() - since < _LEAVING_SECONDS:
            current.thread.join(_TELLING_SECONDS)
            if current.written != written:
                PULSE.at("completing a checkpoint")
                written, since = current.written, time.perf_counter()
