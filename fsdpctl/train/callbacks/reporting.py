"""Metrics of every step to metrics.jsonl and the terminal, and what a restart cost."""

import os
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from fsdpctl.run.step_metrics import StepMetrics
from fsdpctl.train.callback import Callback
from fsdpctl.train.callbacks.checkpoint_manager import CheckpointManager
from fsdpctl.train.callbacks.checks import engine_bytes
from fsdpctl.train.journal import Journal

if TYPE_CHECKING:
    from fsdpctl.train.trainer import Trainer

RESTART = "FSDPCTL_RESTART"  # in the environment


@dataclass(frozen=True, slots=True)
class Restart:
    """The cause and the cost of a restart."""

    number: int
    reason: str
    failed_at: float  # seconds since the epoch
    lost_steps: int  # completed before, and to be repeated

    def to_text(self) -> str:
        """Return the value for the environment of the workers."""
        return msgspec.json.encode(self).decode()

    def to_line(self, step: int) -> dict[str, Any]:
        """Return the object for metrics.jsonl once `step` is completed."""
        seconds = round(time.time() - self.failed_at, 3)
        return {"step": step, "restart": {**asdict(self), "seconds_to_next_step": seconds}}


def current_restart() -> Restart | None:
    """Return the restart that started this worker, or None."""
    text = os.environ.get(RESTART)
    return None if text is None else msgspec.json.decode(text, type=Restart)


class RunReporter(Callback):
    """The metrics of each step, the progress bar, and the peak memory of the engine."""

    def __init__(self, journal: Journal, checkpoints: CheckpointManager | None) -> None:
        """Report to `journal`; the bar shows the progress of `checkpoints`."""
        self._journal, self._checkpoints = journal, checkpoints
        self._restart = current_restart()

    def begin(self, run: "Trainer") -> None:
        """Show the progress bar."""
        self._journal.progress.start()

    def step(self, run: "Trainer", done: StepMetrics) -> None:
        """Write and show the metrics; after the first step also what a restart cost."""
        run.write(done.to_line())
        restart, self._restart = self._restart, None
        if restart is not None:
            line = restart.to_line(done.step)
            run.write(line)
            seconds = line["restart"]["seconds_to_next_step"]
            run.say(f"step {done.step}: first completed step, {seconds:.1f} s after the failure")
        share = None if self._checkpoints is None else self._checkpoints.share_written
        self._journal.progress.step(done, share)

    def end(self, run: "Trainer", error: BaseException | None) -> None:
        """Stop the bar; after the last step, record the peak memory of the fullest rank."""
        self._journal.progress.stop()
        if error is None:
            own = engine_bytes(run.parts.model, run.parts.optimizer)
            peaks = [each for each in run.ranks.gather_objects(own) if each is not None]
            complete = len(peaks) == run.ranks.size
            run.write({"step": run.step, "peak_engine_bytes": max(peaks) if complete else None})
