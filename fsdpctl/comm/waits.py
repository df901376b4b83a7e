"""Time stamps, and exposed communication: the time that computation waits for collectives."""

import time
from collections.abc import Callable
from typing import Any

import torch

from fsdpctl.comm.rank_status import STATUS_PAGE

TimeStamp = float | torch.cuda.Event
GetWaitSeconds = Callable[[], float]  # call it once the device has reached the last time stamp
TakeWaits = Callable[[], GetWaitSeconds]  # for the waits since its last call


def time_stamp(*, on_cuda: bool) -> TimeStamp:
    """Return a time stamp of the host's clock, or on CUDA an event in the current stream."""
    if not on_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(before: TimeStamp, after: TimeStamp) -> float:
    """Return the seconds between two time stamps; on CUDA the device must have reached both."""
    if isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event):
        milliseconds: float = before.elapsed_time(after)
        return milliseconds / 1e3
    assert isinstance(before, float)
    assert isinstance(after, float)
    return after - before


class HostWaits:
    """A measurement of the time that the host waits."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def measure(self, wait: Callable[[], Any]) -> Any:
        """Return the result of `wait()`, and add its duration by the host's clock."""
        began = time.perf_counter()
        STATUS_PAGE.mark_waiting(begins=True)
        result = wait()
        STATUS_PAGE.mark_waiting(begins=False)
        self._seconds += time.perf_counter() - began
        return result

    def take(self) -> GetWaitSeconds:
        seconds, self._seconds = self._seconds, 0.0
        return lambda: seconds


class CudaWaits:
    """A measurement of the compute stream's waits; off by default, since events cost time."""

    def __init__(self) -> None:
        self.measures = False
        self._pairs: list[tuple[TimeStamp, TimeStamp]] = []

    def measure(self, wait: Callable[[], object]) -> None:
        if not self.measures:
            wait()
            return
        before = time_stamp(on_cuda=True)
        wait()
        self._pairs.append((before, time_stamp(on_cuda=True)))

    def take(self) -> GetWaitSeconds:
        """Return a function for the sum since the previous call, valid after the last event."""
        pairs, self._pairs = self._pairs, []
        return lambda: sum(seconds_between(*pair) for pair in pairs)


Waits = HostWaits | CudaWaits
