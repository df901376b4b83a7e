"""What the engine does and holds: its events, and the bytes of its buffers."""

from collections.abc import Callable

from fsdpctl.comm.pulse import PULSE
from fsdpctl.engine.ranges import Ranges
from fsdpctl.plan.schedule import Buffer, Event, EventKind


class Ledger:
    """Counts the buffers that come and go while a model runs, and records events on demand.

    A buffer is known by its purpose, its unit and which flat buffer of that unit it belongs to.
    """

    def __init__(self) -> None:
        self.trace: list[Event] | None = None  # records events while it is a list
        self.on_event: Callable[[], None] = lambda: None
        self.ranges = Ranges()  # for a profile
        self.nbytes = 0  # in all buffers, now
        self.peak_nbytes = 0
        self._held: dict[tuple[Buffer, str, int], int] = {}

    def note(self, kind: EventKind, unit: str, nbytes: int = 0) -> None:
        """Something happened."""
        PULSE.at(f"{kind} {unit}")
        if self.trace is not None:
            self.trace.append(Event(kind, unit, nbytes))
            self.on_event()

    def allocate(self, buffer: Buffer, unit: str, index: int, nbytes: int) -> None:
        """A buffer was made, in the place of one that is there."""
        key = (buffer, unit, index)
        before = self._held.get(key)
        self._held[key] = nbytes
        self.nbytes += nbytes - (before or 0)
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        if self.trace is not None and before is None:
            self.trace.append(Event(EventKind.ALLOCATE, unit, nbytes, buffer))
            self.on_event()

    def free(self, buffer: Buffer, unit: str, index: int) -> None:
        """A buffer was given back; does nothing where there is none."""
        nbytes = self._held.pop((buffer, unit, index), None)
        if nbytes is None:
            return
        self.nbytes -= nbytes
        if self.trace is not None:
            self.trace.append(Event(EventKind.FREE, unit, nbytes, buffer))
            self.on_event()

    def held(self, buffer: Buffer) -> int:
        """Bytes of all buffers for one purpose."""
        return sum(nbytes for key, nbytes in self._held.items() if key[0] is buffer)

    def forget_peak(self) -> None:
        """Start to look for the largest figure again."""
        self.peak_nbytes = self.nbytes
