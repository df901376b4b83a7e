"""heartbeat.json, kept up to date with the run, and the common end of all ranks."""

from typing import TYPE_CHECKING

from fsdpctl.comm.collectives import ObjectExchange
from fsdpctl.run.heartbeat import ENDED, FAILED, STOPPED, Heartbeat
from fsdpctl.run.step_metrics import StepMetrics
from fsdpctl.train.callback import Callback, is_joint

if TYPE_CHECKING:
    from fsdpctl.train.trainer import Trainer


class HeartbeatUpdates(Callback):
    """The steps and the end of a run in its heartbeat."""

    def __init__(self, heartbeat: Heartbeat | None, ranks: ObjectExchange) -> None:
        """Update `heartbeat`, which only rank 0 of `ranks` has."""
        self._heartbeat, self._ranks = heartbeat, ranks

    def step(self, run: "Trainer", done: StepMetrics) -> None:
        """Record a completed step."""
        if self._heartbeat is not None:
            self._heartbeat.step(done.step)

    def went_back(self, run: "Trainer", step: int) -> None:
        """Record the step that the run resumes from."""
        if self._heartbeat is not None:
            self._heartbeat.go_back(step)

    def end(self, run: "Trainer", error: BaseException | None) -> None:
        """Record the end. Ranks that end together wait for rank 0: its collectives would fail."""
        if is_joint(error):
            self._ranks.gather_objects(0)
        if self._heartbeat is None:
            return
        if error is None:
            self._heartbeat.end(ENDED)
        elif is_joint(error):
            self._heartbeat.end(STOPPED, str(error))
        else:
            self._heartbeat.end(FAILED, f"{type(error).__name__}: {error}")
