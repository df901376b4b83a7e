"""The schedule of a training step: the engine executes it, and tests compare the two.

All ranks have the same events. `gather` starts an all-gather, `ready` is when the unit's parameters
may be read, and `release` frees the memory. `reduce` starts the reduction of a unit's gradients;
`reduced` is when this rank has its part of the sum. If more than the part is needed, `combine`
starts a second collective: over the replicas, or to gather the parts. Between them the model
computes: in a unit's `forward`, around it once that was left, and in its `backward`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from fsdpctl.plan.reductions import Reductions
from fsdpctl.plan.strategy import Strategy
from fsdpctl.plan.units import UnitOrder, all_following


class EventKind(StrEnum):
    """The kinds of events of a unit."""

    GATHER = "gather"
    READY = "ready"
    FORWARD = "forward"  # the unit computes; root: everything before the first unit
    LEAVE = "leave"  # forward ended, and everything around the units computes; root: the pass ended
    BACKWARD = "backward"  # its backward computes, then everything around the units
    RELEASE = "release"
    HOLD = "hold"  # gradients stay unsharded on this rank until a later backward reduces them
    REDUCE = "reduce"
    REDUCED = "reduced"
    COMBINE = "combine"
    COMBINED = "combined"
    SYNC = "sync"  # after the optimizer's step, ranks get what others have updated
    ALLOCATE = "allocate"
    FREE = "free"


class Buffer(StrEnum):
    """The purpose of a buffer."""

    PARAMS = "params"  # the slot that a unit is gathered into
    WHOLE_GRADS = "whole gradients"  # of a unit, held or in reduction
    WORKSPACE = "workspace"  # of a reduction
    SUM = "sum"  # the result of a reduction on this rank, until it is in the gradient
    COMBINING = "workspace over replicas"  # of the second collective
    GRADS = "gradients"  # reduced
    OUTBOX = "outbox"  # gradients in shared memory, where other ranks read them
    LEAVING = "leaving gradients"  # reduced, until the host has stepped with them


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a schedule or a recorded trace."""

    kind: EventKind
    unit: str
    nbytes: int = 0  # of a collective or a buffer; 0: only the order is planned
    buffer: Buffer | None = None  # of ALLOCATE and FREE
    # What the plan knows besides: the number of the buffer, what it becomes instead of being freed,
    # and whether no other piece of the unit's gradients follows.
    index: int = field(default=0, compare=False)
    into: "tuple[Buffer, int] | None" = field(default=None, compare=False)
    is_last: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True)
class Prefetch:
    """The number of units gathered ahead of the running one, in forward and in backward."""

    forward: int = 1
    backward: int = 1

    @property
    def depth(self) -> int:
        """The larger of both."""
        return max(self.forward, self.backward)


class ReductionFlow:
    """The order in which gradients are reduced, with a bounded number of bytes in flight."""

    def __init__(self, reductions: Reductions, *, combines: bool) -> None:
        self._reductions = reductions
        self._combines = combines  # whether a second collective follows each reduction
        self._reducing: list[tuple[str, int]] = []  # units and bytes in flight
        self._combining: list[tuple[str, int]] = []

    def start(self, unit: str, *, was_held: bool, is_first: bool) -> Iterator[Event]:
        """Yield what starts the reductions of a unit, and ends earlier ones to make room.

        `is_first`: no reduced gradient exists yet.
        """
        plan = self._reductions
        pieces = plan.pieces_of(unit, was_held=was_held)
        nbytes = -(-plan.nbytes[unit] // pieces)
        for _ in range(pieces):
            while not plan.fits(nbytes, self._sizes(self._reducing), is_first=is_first):
                yield from self._finish_reduction()
            yield Event(EventKind.REDUCE, unit)
            self._reducing.append((unit, nbytes))
            if plan.chained:
                yield from self._combine(unit, nbytes)

    def finish(self) -> Iterator[Event]:
        """Yield the ends of everything in flight."""
        while self._reducing:
            yield from self._finish_reduction()
        while self._combining:
            yield from self._finish_combining()

    def _finish_reduction(self) -> Iterator[Event]:
        unit, nbytes = self._reducing.pop(0)
        yield Event(EventKind.REDUCED, unit)
        if self._combines and not self._reductions.chained:
            yield from self._combine(unit, nbytes)

    def _combine(self, unit: str, nbytes: int) -> Iterator[Event]:
        held = nbytes // (self._reductions.chained or 1)
        while not self._reductions.fits(held, self._sizes(self._combining)):
            yield from self._finish_combining()
        yield Event(EventKind.COMBINE, unit)
        self._combining.append((unit, held))

    def _finish_combining(self) -> Iterator[Event]:
        unit, _ = self._combining.pop(0)
        yield Event(EventKind.COMBINED, unit)

    @staticmethod
    def _sizes(in_flight: Iterable[tuple[str, int]]) -> list[int]:
        return [nbytes for _, nbytes in in_flight]


class _Simulation:
    """The state of the units while the events of a step are planned."""

    def __init__(
        self,
        order: UnitOrder,
        strategy: Strategy,
        reductions: Reductions,
        shared_slots: Sequence[Sequence[str]],
        combines: bool,
    ) -> None:
        self.order = order
        self.slot_of = {u: number for number, units in enumerate(shared_slots) for u in units}
        self.holds: dict[int, str] = {}  # by slot, the unit whose values are still in it
        self.strategy = strategy
        self.flow = ReductionFlow(reductions, combines=combines)
        self.events: list[Event] = []
        self.gathered: set[str] = set()
        self.whole: set[str] = set()
        self.held: set[str] = set()  # units whose gradients wait for a later backward
        self.reduced: set[str] = set()

    def note(self, kind: EventKind, unit: str) -> None:
        self.events.append(Event(kind, unit))

    def gather(self, unit: str) -> None:
        if unit in self.gathered or not self.strategy.shards_params:
            return
        self.gathered.add(unit)
        slot = self.slot_of.get(unit)
        if slot is not None and self.holds.get(slot) == unit:
            self.whole.add(unit)
            self.note(EventKind.READY, unit)
            return
        if slot is not None:
            self.holds[slot] = unit
        self.note(EventKind.GATHER, unit)

    def use(self, unit: str, ahead: Iterable[str] = ()) -> None:
        for each in (unit, *ahead):
            self.gather(each)
        if unit in self.gathered and unit not in self.whole:
            self.whole.add(unit)
            self.note(EventKind.READY, unit)

    def release(self, unit: str) -> None:
        if unit in self.whole:
            self.whole.remove(unit)
            self.gathered.remove(unit)
            self.note(EventKind.RELEASE, unit)

    def gradients(self, unit: str, *, reduces: bool) -> None:
        if not self.order.trains(unit):
            return
        if not reduces:
            self.held.add(unit)
            self.note(EventKind.HOLD, unit)
            return
        was_held, is_first = unit in self.held, unit not in self.reduced
        self.events.extend(self.flow.start(unit, was_held=was_held, is_first=is_first))
        self.reduced.add(unit)
        self.held.discard(unit)

    def forward(self, prefetch: Prefetch) -> None:
        order = self.order
        self.holds.clear()
        self.use(order.root, order.forward[: prefetch.forward + 1] if prefetch.forward else ())
        self.note(EventKind.FORWARD, order.root)
        ahead = all_following(order.forward, prefetch.forward)
        for unit in order.forward:
            self.use(unit, ahead[unit])
            self.note(EventKind.FORWARD, unit)
            if not order.keeps_after_forward(unit, self.strategy):
                self.release(unit)
            self.note(EventKind.LEAVE, unit)

    def backward(self, prefetch: Prefetch, *, reduces: bool) -> None:
        order = self.order
        ahead = all_following(order.backward, prefetch.backward)
        finished: list[str] = []
        for unit in order.gone_back_through:
            if unit not in order.needs_no_backward_gather:
                self.use(unit, ahead[unit])
            for each in finished:
                self.gradients(each, reduces=reduces)
            self.note(EventKind.BACKWARD, unit)
            self.release(unit)
            finished = [unit]
        for each in finished:
            self.gradients(each, reduces=reduces)
        self.release(order.root)
        self.gradients(order.root, reduces=reduces)
        self.events.extend(self.flow.finish())


def step_events(
    order: UnitOrder,
    strategy: Strategy,
    prefetch: Prefetch,
    *,
    reductions: Reductions,
    reduces: Sequence[bool] = (True,),
    shared_slots: Sequence[Sequence[str]] = (),
    combines: bool = False,
) -> tuple[Event, ...]:
    """Plan the events of one step: a forward and a backward for each entry of `reduces`.

    Each entry says whether that backward reduces gradients. What the last unit of forward left in
    one of the `shared_slots`, which stay allocated, is not gathered again for backward.
    """
    simulation = _Simulation(order, strategy, reductions, shared_slots, combines)
    for reduce in reduces:
        simulation.forward(prefetch)
        simulation.backward(prefetch, reduces=reduce)
        simulation.note(EventKind.LEAVE, order.root)
    return tuple(simulation.events)


def update_events(order: UnitOrder, strategy: Strategy) -> tuple[Event, ...]:
    """Plan the events that follow the optimizer's step."""
    if not strategy.renews_params:
        return ()
    units = filter(order.trains, (order.root, *order.forward))
    return tuple(Event(EventKind.SYNC, unit) for unit in units)
