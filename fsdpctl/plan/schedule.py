"""What happens in one training step, in order: the engine executes it, tests hold it to it.

The events of a step are those of every rank. `gather` starts an all-gather and `ready` is when the
unit's parameters may be read; `release` gives the memory back; `reduce` starts the reduction of a
unit's gradients and `reduced` is when this rank has its part of the sum. Where more than the part
is wanted, `combine` starts a second collective: over the copies, or to put the parts together.
Between them the model computes: in a unit's `forward`, around it after it was left, and in a unit's
`backward`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fsdpctl.plan.order import UnitOrder, all_following
from fsdpctl.plan.reductions import Reductions
from fsdpctl.plan.strategy import Strategy


class EventKind(StrEnum):
    """What an event does to a unit."""

    GATHER = "gather"
    READY = "ready"
    FORWARD = "forward"  # the unit computes; for the root what comes before all units
    LEAVE = "leave"  # its forward is over, and what surrounds the units computes; root: all is over
    BACKWARD = "backward"  # its backward computes, and what surrounds the units after it
    RELEASE = "release"
    HOLD = "hold"  # gradients stay whole on this rank until a later backward reduces them
    REDUCE = "reduce"
    REDUCED = "reduced"
    COMBINE = "combine"
    COMBINED = "combined"
    SYNC = "sync"  # after the optimizer's step ranks get what others have updated
    ALLOCATE = "allocate"
    FREE = "free"


class Buffer(StrEnum):
    """What memory is for."""

    PARAMS = "params"  # the slot that a unit is gathered into
    WHOLE_GRADS = "whole gradients"  # of a unit, being held or reduced
    WORKSPACE = "workspace"  # of a reduction
    SUM = "sum"  # what a reduction gives this rank, until it is in the gradient
    COMBINING = "workspace over copies"  # of the second collective
    GRADS = "gradients"  # reduced


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a schedule or a recorded trace."""

    kind: EventKind
    unit: str
    nbytes: int = 0  # sent by a collective or taken by a buffer; 0 where only the order is planned
    buffer: Buffer | None = None  # of ALLOCATE and FREE


@dataclass(frozen=True, slots=True)
class Prefetch:
    """How many units are gathered ahead of the running one, in forward and in backward."""

    forward: int = 1
    backward: int = 1

    @property
    def depth(self) -> int:
        """The larger of both."""
        return max(self.forward, self.backward)


def sizes(in_flight: Iterable[tuple[str, int]]) -> list[int]:
    """The bytes of reductions on their way."""
    return [nbytes for _, nbytes in in_flight]


class _Simulation:
    """The state of the units while the events of a step are written down."""

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
        self.holds: dict[int, str] = {}  # by slot, whose values are still in it
        self.strategy = strategy
        self.reductions = reductions
        self.combines = combines
        self.events: list[Event] = []
        self.gathered: set[str] = set()
        self.whole: set[str] = set()
        self.held: set[str] = set()  # units whose gradients wait for a later backward
        self.reducing: list[tuple[str, int]] = []  # with the bytes of each
        self.reduced: set[str] = set()
        self.combining: list[tuple[str, int]] = []

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
        nbytes = self.reductions.piece_nbytes(unit, was_held=was_held)
        for _ in range(self.reductions.pieces_of(unit, was_held=was_held)):
            while not self.reductions.fits(nbytes, sizes(self.reducing), is_first=is_first):
                self.finish_reduction()
            self.note(EventKind.REDUCE, unit)
            self.reducing.append((unit, nbytes))
            if self.reductions.chained:
                self.combine(unit, nbytes)
        self.reduced.add(unit)
        self.held.discard(unit)

    def finish_reduction(self) -> None:
        unit, nbytes = self.reducing.pop(0)
        self.note(EventKind.REDUCED, unit)
        if self.combines and not self.reductions.chained:
            self.combine(unit, nbytes)

    def combine(self, unit: str, nbytes: int) -> None:
        held = self.reductions.combined_nbytes(nbytes)
        while not self.reductions.fits(held, sizes(self.combining)):
            self.finish_combining()
        self.note(EventKind.COMBINE, unit)
        self.combining.append((unit, held))

    def finish_combining(self) -> None:
        unit, _ = self.combining.pop(0)
        self.note(EventKind.COMBINED, unit)

    def finish_reductions(self) -> None:
        while self.reducing:
            self.finish_reduction()
        while self.combining:
            self.finish_combining()

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
        self.finish_reductions()


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
    """The events of one step: a forward and a backward for each entry of `reduces`.

    Args:
        order: the units in forward order.
        strategy: whole parameters make no gather, ready or release events.
        prefetch: how many units are gathered ahead.
        reductions: how gradients are reduced.
        reduces: per micro-step, whether its backward reduces the gradients.
        shared_slots: the units of each slot whose memory stays; what the last unit of forward left
            in one is not gathered again for backward.
        combines: whether each reduction is followed by a second collective.
    """
    simulation = _Simulation(order, strategy, reductions, shared_slots, combines)
    for reduce in reduces:
        simulation.forward(prefetch)
        simulation.backward(prefetch, reduces=reduce)
        simulation.note(EventKind.LEAVE, order.root)
    return tuple(simulation.events)


def update_events(order: UnitOrder, strategy: Strategy) -> tuple[Event, ...]:
    """What follows the optimizer's step."""
    if not strategy.renews_params:
        return ()
    units = filter(order.trains, (order.root, *order.forward))
    return tuple(Event(EventKind.SYNC, unit) for unit in units)


def most_whole_units(events: Sequence[Event]) -> list[frozenset[str]]:
    """After each event, the units whose parameters take memory (gathering or whole)."""
    alive: set[str] = set()
    states = []
    for event in events:
        if event.kind in (EventKind.GATHER, EventKind.READY):
            alive.add(event.unit)
        elif event.kind is EventKind.RELEASE:
            alive.discard(event.unit)
        states.append(frozenset(alive))
    return states
