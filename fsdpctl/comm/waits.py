"""How long computation stood still for communication."""

import time
from collections.abc import Callable
from typing import Protocol

import torch

from fsdpctl.comm.pulse import PULSE

Seconds = Callable[[], float]  # known when the device has got there


class Waits(Protocol):
    """Adds up what waiting costs."""

    def around(self, wait: Callable[[], object]) -> None:
        """Do `wait()`, and count how long it takes."""
        ...

    def take(self) -> Seconds:
        """What was counted since the last time."""
        ...


class HostWaits:
    """The host itself waits."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def around(self, wait: Callable[[], object]) -> None:
        """By the host's clock."""
        began = time.perf_counter()
        PULSE.wait(begins=True)
        wait()
        PULSE.wait(begins=False)
        self._seconds += time.perf_counter() - began

    def take(self) -> Seconds:
        """Known at once."""
        seconds, self._seconds = self._seconds, 0.0
        return lambda: seconds


class CudaWaits:
    """The compute stream waits; counted only while `measures` is set, since events have a price."""

    def __init__(self) -> None:
        self.measures = False
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def around(self, wait: Callable[[], object]) -> None:
        """By an event before and one after."""
        if not self.measures:
            wait()
            return
        stream = torch.cuda.current_stream()
        before = stream.record_event(torch.cuda.Event(enable_timing=True))
        wait()
        self._pairs.append((before, stream.record_event(torch.cuda.Event(enable_timing=True))))

    def take(self) -> Seconds:
        """Known when the last of them has passed."""
        pairs, self._pairs = self._pairs, []
        return lambda: sum(before.elapsed_time(after) for before, after in pairs) / 1e3
