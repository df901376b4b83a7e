"""What happens in one training step, in order: the engine executes it, tests hold it to it.

The events of a step are those of every rank. `gather` starts an all-gather and `ready` is when the
unit's parameters may be read; `release` gives the memory back; `reduce` starts the reduction of a
unit's gradients and `reduced` is when this rank has its part of the sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fsdpctl.plan.strategy import Strategy


class EventKind(StrEnum):
    """What an event does to a unit."""

    GATHER = "gather"
    READY = "ready"
    RELEASE = "release"
    REDUCE = "reduce"
    REDUCED = "reduced"
    SYNC = "sync"  # parameters that stay whole are renewed after the optimizer's step


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a schedule or a recorded trace."""

    kind: EventKind
    unit: str


@dataclass(frozen=True, slots=True)
class Prefetch:
    """How many units are gathered ahead of the running one, in forward and in backward."""

    forward: int = 1
    backward: int = 1

    @property
    def depth(self) -> int:
        """The larger of both."""
        return max(self.forward, self.backward)


@dataclass(frozen=True, slots=True)
class UnitOrder:
    """The units besides the root in the order of their forward, and how each behaves."""

    root: str
    forward: tuple[str, ...]
    needs_no_backward_gather: frozenset[str] = frozenset()  # the embedding reads no weights there

    @property
    def backward(self) -> tuple[str, ...]:
        """The units gathered for backward, in that order."""
        return tuple(
            unit for unit in reversed(self.forward) if unit not in self.needs_no_backward_gather
        )

    @property
    def reduction(self) -> tuple[str, ...]:
        """The order in which all ranks start the reductions."""
        return (*reversed(self.forward), self.root)

    def keeps_after_forward(self, unit: str, strategy: Strategy) -> bool:
        """Whether a unit stays whole from its forward to its backward."""
        if unit in self.needs_no_backward_gather:
            return False
        return not strategy.reshard_after_forward or unit == self.forward[-1]


def following(order: Sequence[str], unit: str, depth: int) -> tuple[str, ...]:
    """The `depth` units that come after `unit` in `order`."""
    index = order.index(unit)
    return tuple(order[index + 1 : index + 1 + depth])


class _Simulation:
    """The state of the units while the events of a step are written down."""

    def __init__(self, order: UnitOrder, strategy: Strategy, reductions_in_flight: int) -> None:
        self.order = order
        self.strategy = strategy
        self.events: list[Event] = []
        self.gathered: set[str] = set()
        self.whole: set[str] = set()
        self.in_flight: list[str] = []
        self.limit = reductions_in_flight

    def note(self, kind: EventKind, unit: str) -> None:
        self.events.append(Event(kind, unit))

    def gather(self, unit: str) -> None:
        if unit not in self.gathered:
            self.gathered.add(unit)
            self.note(EventKind.GATHER, unit)

    def use(self, unit: str) -> None:
        self.gather(unit)
        if unit not in self.whole:
            self.whole.add(unit)
            self.note(EventKind.READY, unit)

    def release(self, unit: str) -> None:
        if unit in self.whole:
            self.whole.remove(unit)
            self.gathered.remove(unit)
            self.note(EventKind.RELEASE, unit)

    def reduce(self, unit: str) -> None:
        while len(self.in_flight) >= self.limit:
            self.finish_reduction()
        self.note(EventKind.REDUCE, unit)
        self.in_flight.append(unit)

    def finish_reduction(self) -> None:
        self.note(EventKind.REDUCED, self.in_flight.pop(0))

    def forward(self, prefetch: Prefetch) -> None:
        order = self.order
        self.use(order.root)
        for unit in order.forward[: prefetch.forward]:
            self.gather(unit)
        for unit in order.forward:
            self.use(unit)
            for ahead in following(order.forward, unit, prefetch.forward):
                self.gather(ahead)
            if not order.keeps_after_forward(unit, self.strategy):
                self.release(unit)

    def backward(self, prefetch: Prefetch, *, reduces: bool) -> None:
        order = self.order
        for unit in reversed(order.forward):
            if unit not in order.needs_no_backward_gather:
                self.use(unit)
                for ahead in following(order.backward, unit, prefetch.backward):
                    self.gather(ahead)
            self.release(unit)
            if reduces:
                self.reduce(unit)
        self.release(order.root)
        if reduces:
            self.reduce(order.root)
        while self.in_flight:
            self.finish_reduction()


def step_events(
    order: UnitOrder,
    strategy: Strategy,
    prefetch: Prefetch,
    *,
    reduces: Sequence[bool] = (True,),
    reductions_in_flight: int = 1,
) -> tuple[Event, ...]:
    """The events of one step: a forward and a backward for each entry of `reduces`.

    Args:
        order: the units in forward order.
        strategy: whole parameters make no gather, ready or release events.
        prefetch: how many units are gathered ahead.
        reduces: per micro-step, whether its backward reduces the gradients.
        reductions_in_flight: how many reductions may run before one is waited for.
    """
    simulation = _Simulation(order, strategy, reductions_in_flight)
    for reduce in reduces:
        if strategy.shards_params:
            simulation.forward(prefetch)
            simulation.backward(prefetch, reduces=reduce)
        else:
            _reduce_only(simulation, reduce)
    return tuple(simulation.events)


def update_events(order: UnitOrder, strategy: Strategy) -> tuple[Event, ...]:
    """What follows the optimizer's step."""
    if strategy.shards_params or not strategy.shards_optimizer:
        return ()
    return tuple(Event(EventKind.SYNC, unit) for unit in (order.root, *order.forward))


def _reduce_only(simulation: _Simulation, reduce: bool) -> None:
    for unit in simulation.order.reduction if reduce else ():
        simulation.reduce(unit)
    while simulation.in_flight:
        simulation.finish_reduction()


def most_whole_units(events: Sequence[Event]) -> list[frozenset[str]]:
    """After each event, the units whose parameters take memory (gathering or whole)."""
    alive: set[str] = set()
    states = []
    for event in events:
        if event.kind is EventKind.GATHER:
            alive.add(event.unit)
        elif event.kind is EventKind.RELEASE:
            alive.discard(event.unit)
        states.append(frozenset(alive))
    return states
