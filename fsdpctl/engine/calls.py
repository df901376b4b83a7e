"""Which forwards of units have yet to be gone back through, and so which units are still needed.

Autograd runs what is ready in descending order of creation. So once the backward of one call has
begun, that of every call made after it is over, whether it came at all or not.

All ranks must draw the same conclusions, or they wait for each other in different collectives. So
they follow from what was called, not from what became of it: counting arrived gradients, or looking
at which outputs are still alive, differs where ranks use different parameters or outputs. Where
there were several forwards since the last backward, ranks ask autograd which of them the next one
goes back through, and tell each other.
"""

from collections.abc import Callable, Sequence
from weakref import WeakSet, ref

from fsdpctl.engine.forward import Forward
from fsdpctl.errors import EngineError

Agree = Callable[[Sequence[bool]], Sequence[bool]]


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
        self.running = Forward()  # the last one of the outermost module, or still before the first
        self._alive: WeakSet[Forward] = WeakSet()
        self._recent: list[ref[Forward]] = []  # with a graph, since the last backward ended
        self._hidden: set[str] = set()

    def begin_forward(self, *, tracks: bool) -> None:
        """The outermost module starts; `tracks` says whether autograd is on."""
        self.running.close()
        self.running = Forward()
        self._tracks = tracks
        self.order = {}
        if tracks:
            self._recent.append(ref(self.running))

    def end_forward(self) -> None:
        """The outermost module has ended."""
        self.running.close()

    def begin_backward(self, first: Forward | None, agree: Agree) -> None:
        """Find out which forwards autograd goes back through.

        Args:
            first: the one whose gradient came first; None where that was made within a backward.
            agree: from whether each of some forwards takes part here, as far as autograd says, to
                whether it does anywhere, or nothing where autograd does not say so everywhere.
        """
        recent = [each() for each in self._recent]
        # Autograd says nothing of a backward around this one, and too little of one to few inputs.
        is_told = first is not None and first.is_in_backward()
        for forward in self._alive:
            is_alone = recent == [forward]
            forward.takes_part = is_alone or not is_told or forward.is_in_backward()
        if len(recent) < 2:
            return
        own = [each is not None and each.takes_part for each in recent]
        for each, takes_part in zip(recent, agree(own if is_told else []), strict=False):
            if each is not None:
                each.takes_part = takes_part

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
        self.running.numbers.setdefault(unit, []).append(self._number)
        self._alive.add(self.running)
        return Call(self.running, self._number)

    def begin(self, call: Call) -> None:
        """The running backward has come to `call`.

        Raises:
            EngineError: autograd did not say so when it began.
        """
        if not call.forward.takes_part:
            raise EngineError(
                "backward came to a forward that was not part of it when it began: units may have "
                "been reduced without it; a function that runs a backward of its own within "
                "another must not use a sharded model's older outputs"
            )
        call.forward.began_in[call.number] = self.backward

    def is_over(self, unit: str, at: Call) -> bool:
        """Whether no backward of `unit` can come any more once that of `at` has begun."""
        if unit in self._hidden:
            return False
        return not any(
            number < at.number and forward.began_in.get(number) != self.backward
            for forward in self._alive
            if forward.takes_part
            for number in forward.numbers.get(unit, ())
        )

    def end_backward(self, *, keeps_graph: bool) -> None:
        """Autograd is done; without its graph, nothing of these forwards comes again."""
        if not keeps_graph:
            done = [each for each in self._alive if self.backward in each.began_in.values()]
            self._alive.difference_update(done)
        self._hidden.clear()
        self._recent.clear()
        self.backward += 1

    def forget(self) -> None:
        """No call will be gone back through; what nevertheless is, is nobody's fault."""
        for forward in self._alive:
            forward.takes_part = True
        self._alive.clear()
        self._recent.clear()
        self._hidden.clear()
        self.backward += 1
