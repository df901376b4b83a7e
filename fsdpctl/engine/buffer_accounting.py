"""Records the engine's events, counts the bytes of its buffers, and names ranges in profiles."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch.profiler import record_function

from fsdpctl.comm.rank_status import STATUS_PAGE
from fsdpctl.plan.schedule import BufferKind, Event, EventKind

_NOTHING = nullcontext()


class ProfilerRanges:
    """The named ranges of a profile. While `is_on` is false, ranges take no time."""

    def __init__(self) -> None:
        self.is_on = False
        self._open: list[record_function] = []

    def annotate(self, name: str, unit: str) -> AbstractContextManager[object]:
        return record_function(f"{name} {unit}") if self.is_on else _NOTHING

    def begin(self, name: str, unit: str) -> None:
        if self.is_on:
            profiled = record_function(f"{name} {unit}")
            profiled.__enter__()
            self._open.append(profiled)

    def end(self) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def end_all(self) -> None:
        while self._open:
            self.end()


class BufferAccounting:
    """The bytes of the engine's buffers, and a trace of the engine's events.

    A buffer is identified by its kind, its unit and the index of the unit's flat buffer.
    """

    def __init__(self) -> None:
        self.trace: list[Event] | None = None  # None: events are not recorded
        self.on_event: Callable[[], None] = lambda: None  # called after each event of the trace
        self.ranges = ProfilerRanges()
        self.nbytes = 0  # in all buffers, now
        self.peak_nbytes = 0
        self._nbytes: dict[tuple[BufferKind, str, int], int] = {}

    def record(self, kind: EventKind, unit: str, nbytes: int = 0) -> None:
        """Record an event in the trace and in this rank's status."""
        STATUS_PAGE.at(f"{kind} {unit}")
        if self.trace is not None:
            self._record(self.trace, Event(kind, unit, nbytes))

    def _record(self, trace: list[Event], event: Event) -> None:
        trace.append(event)
        self.on_event()

    def allocate(self, kind: BufferKind, unit: str, index: int, nbytes: int) -> None:
        """Count a buffer; it replaces a buffer with the same kind, unit and index."""
        key = (kind, unit, index)
        previous = self._nbytes.get(key)
        self._nbytes[key] = nbytes
        self.nbytes += nbytes - (previous or 0)
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        if self.trace is not None and previous is None:
            self._record(self.trace, Event(EventKind.ALLOCATE, unit, nbytes, kind))

    def deallocate(self, kind: BufferKind, unit: str, index: int) -> None:
        nbytes = self._nbytes.pop((kind, unit, index), None)
        if nbytes is None:
            return
        self.nbytes -= nbytes
        if self.trace is not None:
            self._record(self.trace, Event(EventKind.DEALLOCATE, unit, nbytes, kind))

    def total(self, kind: BufferKind) -> int:
        return sum(nbytes for key, nbytes in self._nbytes.items() if key[0] is kind)
