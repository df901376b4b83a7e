"""Where the time of a step goes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from fsdpctl.comm.marks import Mark, mark, seconds_between
from fsdpctl.comm.waits import Seconds

Phase = Literal["data", "compute", "optimizer"]


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
        self._began = mark(on_cuda=self._on_cuda)
        self._last = self._began
        self._laps: list[tuple[Phase, Mark, Mark, Seconds]] = []

    def lap(self, phase: Phase) -> None:
        """What was done since the last lap was `phase`."""
        now = mark(on_cuda=self._on_cuda)
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
            spent[phase] += max(0.0, seconds_between(start, end) - waited)
            exposed += waited
        total, known = (
            seconds_between(self._began, self._last),
            exposed if self._knows_waits else None,
        )
        return StepTimes(total, exposed_communication=known, **spent)


def _no_waits() -> Seconds:
    return lambda: 0.0
