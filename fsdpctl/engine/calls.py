"""Which forwards of units have yet to be gone back through, and so which units are still needed.

Autograd runs what is ready in descending order of creation. So once the backward of one call has
begun, that of every call made after it is over, whether it came at all or not. Counting arrived
gradients instead would not do: a parameter that only some ranks use would let the others run ahead,
and wait for each other in different collectives.
"""

from weakref import WeakSet


class Call:
    """One forward of a unit. Its graph keeps it; it is gone with the graph."""

    def __init__(self, unit: str, number: int, forward: int) -> None:
        self.unit = unit
        self.number = number  # in the order of all calls
        self.forward = forward  # the forward of the outermost module that it belongs to
        self.began_in = -1  # the number of the last backward that came to it


class Calls:
    """The calls of all units of one model."""

    def __init__(self) -> None:
        self.backward = 0  # the number of the next backward, or of the running one
        self.order: dict[str, None] = {}  # names of the units in the last forward, as they ran
        self._forward = 0
        self._tracks = False  # whether the outermost module's forward makes a graph
        self._number = 0
        self._open: dict[str, WeakSet[Call]] = {}
        self._hidden: set[str] = set()

    def begin_forward(self, *, tracks: bool) -> None:
        """The outermost module starts; `tracks` says whether autograd is on."""
        self._forward += 1
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
        call = Call(unit, self._number, self._forward)
        self._open.setdefault(unit, WeakSet()).add(call)
        return call

    def begin(self, call: Call) -> None:
        """The running backward has come to `call`."""
        call.began_in = self.backward

    def is_over(self, unit: str, at: Call) -> bool:
        """Whether no backward of `unit` can come any more once that of `at` has begun."""
        if unit in self._hidden:
            return False
        return not any(
            call.number < at.number and call.began_in != self.backward
            for call in self._open.get(unit, ())
        )

    def end_backward(self, *, keeps_graph: bool) -> None:
        """Autograd is done; without its graph, none of its calls comes again."""
        if not keeps_graph:
            done = {
                call.forward
                for calls in self._open.values()
                for call in calls
                if call.began_in == self.backward
            }
            for unit, calls in self._open.items():
                self._open[unit] = WeakSet(each for each in calls if each.forward not in done)
        self._hidden.clear()
        self.backward += 1

    def forget(self) -> None:
        """No call will be gone back through."""
        self._open.clear()
        self._hidden.clear()
        self.backward += 1
