"""The duration of each phase of a step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from fsdpctl.comm.waits import Mark, Seconds, mark, seconds_between

Phase = Literal["data", "compute", "optimizer"]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The seconds of one step on this rank."""

    total: float
    compute: float  # forward and backward
    exposed_communication: float | None  # in all phases; None: included in the others
    data: float
    optimizer: float  # including the gradient norm


class StepClock:
    """A stopwatch for phases: the host's clock, or on CUDA events, which cost the host nothing."""

    def __init__(self, device: torch.device, take_waits: Callable[[], Seconds] | None) -> None:
        """Start a step. `take_waits()` returns the time spent waiting since its last call."""
        self._on_cuda = device.type == "cuda"
        self._knows_waits = take_waits is not None
        self._take_waits = take_waits or _no_waits
        self._take_waits()
        self._began = mark(on_cuda=self._on_cuda)
        self._last = self._began
        self._laps: list[tuple[Phase, Mark, Mark, Seconds]] = []

    def lap(self, phase: Phase) -> None:
        """Attribute the time since the last lap to `phase`."""
        now = mark(on_cuda=self._on_cuda)
        self._laps.append((phase, self._last, now, self._take_waits()))
        self._last = now

    def times(self) -> StepTimes:
        """Return the times of all laps; may wait for the device."""
        if isinstance(self._last, torch.cuda.Event):
            self._last.synchronize()
        spent = {"data": 0.0, "compute": 0.0, "optimizer": 0.0}
        exposed = 0.0
        for phase, start, end, waits in self._laps:
            waited = waits()
            spent[phase] += max(0.0, seconds_between(start, end) - waited)
            exposed += waited
        total, known = (
            seconds_between(self._began, self._last),
            exposed if self._knows_waits else None,
        )
        return StepTimes(total, exposed_communication=known, **spent)


def _no_waits() -> Seconds:
    return lambda: 0.0
