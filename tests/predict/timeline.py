"""The timeline of simulated steps: the spans of the compute stream and of the queues."""

from typing import Any, NamedTuple

from fsdpctl.predict.simulator import SimulatedStep, StepSimulator

COMPUTE = "compute"


class TimelineSpan(NamedTuple):
    """A task that ran from `start` to `end`, in seconds since the start of the step."""

    lane: str  # COMPUTE, or the name of a queue
    label: str
    start: float
    end: float


class Timeline(StepSimulator):
    """A simulator that keeps the spans of each step."""

    of_step: dict[int, list[TimelineSpan]] = {}  # by the id of the step

    def __init__(self) -> None:
        super().__init__()
        self._begun: dict[int, float] = {}

    def run(self, tasks: Any) -> SimulatedStep:
        self._begun = {key: at - self._step.seconds for key, at in self._begun.items()}
        self._spans: list[TimelineSpan] = []
        step = super().run(tasks)
        self.of_step[id(step)] = self._spans
        return step

    def _compute(self, task: Any) -> None:
        began = self._step.seconds
        super()._compute(task)
        if self._step.seconds > began:
            self._spans.append(TimelineSpan(COMPUTE, task.label, began, self._step.seconds))

    def _queue_heads(self) -> list[Any]:
        firsts = super()._queue_heads()
        for each in firsts:
            self._begun.setdefault(each.start.key, self._step.seconds)
        return firsts

    def _end(self, each: Any) -> None:
        super()._end(each)
        begun, start = self._begun.pop(each.start.key), each.start
        self._spans.append(TimelineSpan(start.queue, start.label, begun, self._step.seconds))


def spans(step: SimulatedStep, lane: str | None = None) -> list[TimelineSpan]:
    """Return the spans of a lane in a step; without a lane, of all lanes."""
    return [each for each in Timeline.of_step[id(step)] if lane in (None, each.lane)]
