"""Which forwards of units have yet to be gone back through, and so which units are still needed.

Autograd runs what is ready in descending order of creation. So once the backward of one call has
begun, that of every call made after it is over, whether it came at all or not.

All ranks must draw the same conclusions, or they wait for each other in different collectives. So
they follow from what was called, not from what became of it: counting arrived gradients, or looking
at which outputs are still alive, differs where ranks use different parameters or outputs.
"""

from weakref import WeakSet


class Forward:
    """One forward of the outermost module. Its graph keeps it; it is gone with all of that."""

    def __init__(self) -> None:
        self.numbers: dict[str, list[int]] = {}  # by unit, those of its calls
        self.began_in: dict[int, int] = {}  # by call, the last backward that came to it


class Call:
    """One forward of a unit, numbered in the order of all calls."""

    __slots__ = ("forward", "number")

    def __init__(self, forward: Forward, number: int) -> None:
        self.forward = forward
        self.number = number


class Calls:
    """The calls of all units of one model."""

    def __init__(self) -> None:
        self.backward = 0  # the number of the next backward, or of the running one
        self.order: dict[str, None] = {}  # names of the units in the last forward, as they ran
        self._tracks = False  # whether the outermost module's forward makes a graph
        self._number = 0
        self._running = Forward()
        self._alive: WeakSet[Forward] = WeakSet()
        self._hidden: set[str] = set()

    def begin_forward(self, *, tracks: bool) -> None:
        """The outermost module starts; `tracks` says whether autograd is on."""
        self._running = Forward()
        self._tracks = tracks
        self.order = {}

    def ran(self, unit: str, *, tracks: bool) -> None:
        """A unit's forward begins, with or without autograd."""
        if self._tracks:
            self.order[unit] = None
            if not tracks:
                # It may be computed again by a backward within the backward, whenever that comes.
                self._hidden.add(unit)

    def open(self, unit: str) -> Call:
        """A unit's forward has made something whose gradient may come."""
        self._number += 1
        self._running.numbers.setdefault(unit, []).append(self._number)
        self._alive.add(self._running)
        return Call(self._running, self._number)

    def begin(self, call: Call) -> None:
        """The running backward has come to `call`."""
        call.forward.began_in[call.number] = self.backward

    def is_over(self, unit: str, at: Call) -> bool:
        """Whether no backward of `unit` can come any more once that of `at` has begun."""
        if unit in self._hidden:
            return False
        return not any(
            number < at.number and forward.began_in.get(number) != self.backward
            for forward in self._alive
            for number in forward.numbers.get(unit, ())
        )

    def end_backward(self, *, keeps_graph: bool) -> None:
        """Autograd is done; without its graph, nothing of these forwards comes again."""
        if not keeps_graph:
            done = [each for each in self._alive if self.backward in each.began_in.values()]
            self._alive.difference_update(done)
        self._hidden.clear()
        self.backward += 1

    def forget(self) -> None:
        """No call will be gone back through."""
        self._alive.clear()
        self._hidden.clear()
        self.backward += 1
