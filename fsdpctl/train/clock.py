"""Where the time of a step goes."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from fsdpctl.comm.waits import Seconds

Phase = Literal["data", "compute", "optimizer"]
_Mark = float | torch.cuda.Event


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The seconds of one step on this rank."""

    total: float
    compute: float  # forward and backward
    exposed_communication: float | None  # what was waited for, whenever; None: within the others
    data: float
    optimizer: float  # with the norm of the gradient


class StepClock:
    """Tells phases apart: by the host's clock, or on CUDA by events that cost the host nothing."""

    def __init__(self, device: torch.device, take_waits: Callable[[], Seconds] | None) -> None:
        """Begin a step; `take_waits()` gives what was waited for since its last call."""
        self._on_cuda = device.type == "cuda"
        self._knows_waits = take_waits is not None
        self._take_waits = take_waits or _no_waits
        self._take_waits()
        self._began = self._mark()
        self._last = self._began
        self._laps: list[tuple[Phase, _Mark, _Mark, Seconds]] = []

    def lap(self, phase: Phase) -> None:
        """What was done since the last lap was `phase`."""
        now = self._mark()
        self._laps.append((phase, self._last, now, self._take_waits()))
        self._last = now

    def times(self) -> StepTimes:
        """What the laps say; waits for the device if it has to."""
        if isinstance(self._last, torch.cuda.Event):
            self._last.synchronize()
        spent = {"data": 0.0, "compute": 0.0, "optimizer": 0.0}
        exposed = 0.0
        for phase, start, end, waits in self._laps:
            waited = waits()
            spent[phase] += max(0.0, _between(start, end) - waited)
            exposed += waited
        total, known = _between(self._began, self._last), exposed if self._knows_waits else None
        return StepTimes(total, exposed_communication=known, **spent)

    def _mark(self) -> _Mark:
        if not self._on_cuda:
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark


def _no_waits() -> Seconds:
    return lambda: 0.0


def _between(start: _Mark, end: _Mark) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3
    assert isinstance(start, float)
    assert isinstance(end, float)
    return end - start
