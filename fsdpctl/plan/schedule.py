"""The schedule of a training step: the engine executes it, and tests compare both.

All ranks have the same events in the same order, since most events start or wait for a collective.
`gather` starts an all-gather. From `ready` on, the unit's parameters can be read, until `free`
frees the memory. `reduce` starts the reduction of a unit's gradients. After `reduced`, this rank
has its shard of the sum. If a rank needs more than its shard, `combine` starts a second collective:
a sum over the replicas, or a gather of the shards. Between these events, the model computes: in a
unit's `forward`, outside of units after `leave`, and in a unit's `backward`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from fsdpctl.errors import ModuleError
from fsdpctl.plan.step_plan import Prefetch, Reductions, StepPlan, UnshardBufferSpec
from fsdpctl.plan.strategy import Strategy
from fsdpctl.plan.units import UnitOrder, following_units


class EventKind(StrEnum):
    """The kinds of events of a unit."""

    GATHER = "gather"
    READY = "ready"
    FORWARD = "forward"  # the unit computes; root: the code before the first unit
    LEAVE = "leave"  # the unit's forward ended, code outside the units runs; root: the pass ended
    BACKWARD = "backward"  # the unit's backward computes, then code outside the units
    FREE = "free"
    HOLD = "hold"  # gradients stay unsharded on this rank until a later backward reduces them
    REDUCE = "reduce"
    REDUCED = "reduced"
    COMBINE = "combine"
    COMBINED = "combined"
    SYNC = "sync"  # ranks receive the parameters that other ranks' optimizers updated
    ALLOCATE = "allocate"
    DEALLOCATE = "deallocate"


class BufferKind(StrEnum):
    """The purpose of a buffer."""

    PARAMS = "params"  # an unshard buffer
    UNSHARDED_GRADS = "unsharded gradients"  # a unit's gradients, held or in reduction
    WORKSPACE = "workspace"  # memory of a reduction
    SUM = "sum"  # the result of a reduction on this rank, until it is in the gradient
    REPLICA_WORKSPACE = "replica workspace"  # memory of the second collective
    GRADS = "gradients"  # reduced gradients
    OUTBOX = "outbox"  # gradients in shared memory, where other ranks read them
    OFFLOADING = "offloaded gradients"  # reduced gradients that the host has not stepped yet


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a schedule or a recorded trace."""

    kind: EventKind
    unit: str
    nbytes: int = 0  # size of the collective or buffer; 0: only the order is planned
    buffer: BufferKind | None = None  # set for ALLOCATE and DEALLOCATE
    # Only in planned events. A buffer with `into` becomes that buffer instead of being freed.
    index: int = field(default=0, compare=False)  # the buffer's; REDUCE: the piece's
    into: "tuple[BufferKind, int] | None" = field(default=None, compare=False)
    is_last: bool = field(default=True, compare=False)  # no piece of the unit's gradients follows


class ReductionFlow:
    """The order in which gradients are reduced, with a bounded number of bytes in flight."""

    def __init__(self, reductions: Reductions) -> None:
        self._reductions = reductions
        self._reducing: list[tuple[str, int]] = []  # units and bytes in flight
        self._combining: list[tuple[str, int]] = []

    def start(self, unit: str, *, was_held: bool, is_first: bool) -> Iterator[Event]:
        """Start the reductions of a unit, after earlier reductions that must end to make room.

        `is_first`: the unit has no reduced gradient yet.
        """
        reductions = self._reductions
        pieces = 1 if was_held else reductions.pieces.get(unit, 1)
        nbytes = -(-reductions.nbytes[unit] // pieces)
        for piece in range(pieces):
            while not reductions.fits(nbytes, [n for _, n in self._reducing], is_first=is_first):
                yield from self._finish_reduction()
            yield Event(EventKind.REDUCE, unit, index=piece, is_last=piece + 1 == pieces)
            self._reducing.append((unit, nbytes))
            if reductions.chained_ranks:
                yield from self._combine(unit, nbytes)

    def finish(self) -> Iterator[Event]:
        while self._reducing:
            yield from self._finish_reduction()
        while self._combining:
            yield Event(EventKind.COMBINED, self._combining.pop(0)[0])

    def _finish_reduction(self) -> Iterator[Event]:
        unit, nbytes = self._reducing.pop(0)
        yield Event(EventKind.REDUCED, unit)
        if self._reductions.combines and not self._reductions.chained_ranks:
            yield from self._combine(unit, nbytes)

    def _combine(self, unit: str, nbytes: int) -> Iterator[Event]:
        # If chained, only the shard of the sum is in flight.
        combined = nbytes // (self._reductions.chained_ranks or 1)
        while not self._reductions.fits(combined, [n for _, n in self._combining]):
            yield Event(EventKind.COMBINED, self._combining.pop(0)[0])
        yield Event(EventKind.COMBINE, unit)
        self._combining.append((unit, combined))


class Schedule:
    """The decisions on when units are gathered, freed and reduced while a model runs.

    The engine calls it from hooks and executes the events that it yields. `step_events` calls it in
    the planned order. Both get the same events if the model runs its units in that order.
    """

    def __init__(
        self,
        order: UnitOrder,
        strategy: Strategy,
        prefetch: Prefetch,
        reductions: Reductions,
        buffers: Sequence[UnshardBufferSpec] = (),
    ) -> None:
        """Start with sharded units. Permanent `buffers` keep the values of their last unit."""
        self.strategy, self.prefetch = strategy, prefetch
        self.is_prefetched = False  # whether `prefetch_forward` came since the last forward
        self._reductions = reductions
        shared = [each.units for each in buffers if each.is_permanent]
        # A buffer has the name of its first unit.
        self._buffer_of = {unit: units[0] for units in shared for unit in units}
        self._occupants: dict[str, str] = {}  # buffer: its unit, unsharded or in flight
        # Permanent buffer: the unit whose values it has. An update makes all values old.
        self._contents: dict[str, str] = {}
        self._gathering: set[str] = set()
        self._unsharded: set[str] = set()
        self._learns_order = strategy.shards_params  # otherwise nothing is gathered in this order
        self.use_order(order)
        self.reset()

    @classmethod
    def of(cls, plan: StepPlan) -> "Schedule":
        return cls(plan.order, plan.strategy, plan.prefetch, plan.reductions, plan.unshard_buffers)

    def use_order(self, order: UnitOrder) -> None:
        """Use `order` from now on."""
        self.order = order
        self._reduction = order.reduction_order
        self._first_units = order.forward[: self.prefetch.forward + 1]
        self._forward_ahead = following_units(order.forward, self.prefetch.forward)
        self._backward_ahead = following_units(order.backward_readers, self.prefetch.backward)

    def reset(self) -> None:
        """Forget gradients and an interrupted backward."""
        self._flow = ReductionFlow(self._reductions)
        self._ran: dict[str, None] = {}  # units in the order of the last forward with a graph
        self._running: set[str] = set()  # units whose forward has not ended
        self._regathered: set[str] = set()  # units that the running backward has gathered
        self._num_completed = 0  # units whose backward is over, in the order of reduction
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Expect no gradients of earlier backwards."""
        self._held: set[str] = set()  # units whose gradients wait for a later backward
        self._reduced: set[str] = set()

    def prefetch_forward(self) -> Iterator[Event]:
        """Gather the first units before forward, after an update."""
        self._contents.clear()
        yield from self._prefetch((self.order.root, *self._first_units))
        self.is_prefetched = True

    def begin_forward(self, *, has_backward: bool = True) -> Iterator[Event]:
        """Begin the forward of the outermost module."""
        self._running.clear()
        self._ran, self._has_backward = {}, has_backward
        if not self.is_prefetched:
            self._contents.clear()
        # `begin_unit` prefetches only units behind these.
        ahead = self._first_units if self.prefetch.forward else ()
        yield from self._unshard(self.order.root, ahead)
        self.is_prefetched = False
        yield Event(EventKind.FORWARD, self.order.root)

    def begin_unit(self, unit: str) -> Iterator[Event]:
        yield from self._unshard(unit, self._forward_ahead[unit])
        self._running.add(unit)
        if self._has_backward:
            self._ran[unit] = None
        yield Event(EventKind.FORWARD, unit)

    def end_unit(self, unit: str, *, has_backward: bool = True) -> Iterator[Event]:
        """End a unit's forward."""
        self._running.discard(unit)
        if not (has_backward and self.order.stays_unsharded(unit, self.strategy)):
            yield from self._free(unit)
        yield Event(EventKind.LEAVE, unit)

    def end_evaluation(self) -> Iterator[Event]:
        """Free the root after a forward without a backward."""
        yield from self._free(self.order.root)

    def begin_backward(self) -> Iterator[Event]:
        """Begin a backward, or continue it after a forward."""
        yield from self._unshard(self.order.root)

    def recompute_unit(self, unit: str) -> Iterator[Event]:
        yield from self._unshard(unit)
        self._regathered.add(unit)

    def pending_units(self) -> Iterator[str]:
        """Yield the units whose backward is not over, in the order of reduction."""
        return iter(self._reduction[self._num_completed :])

    def begin_unit_backward(
        self, unit: str, completed: Sequence[str], *, reduces: bool
    ) -> Iterator[Event]:
        """Begin a unit's backward; the backward of the units `completed` has ended.

        The reduction of the last completed unit starts after the next gathers, because backward
        waits for these first. Reductions of earlier units start at once: other ranks may wait for
        them before they gather, so a gather here first would deadlock.
        """
        for each in completed:
            yield from self._end_unit_backward(each)
            if each != completed[-1]:
                yield from self._reduce(each, reduces=reduces)
        if unit not in self.order.lookups:
            yield from self._unshard(unit, self._backward_ahead.get(unit, ()))
            self._regathered.add(unit)
        if completed:
            yield from self._reduce(completed[-1], reduces=reduces)
        yield Event(EventKind.BACKWARD, unit)

    def end_units(self, *, reduces: bool) -> Iterator[Event]:
        """End backward: reduce or hold the gradients of all pending units, and free all units."""
        for unit in self.pending_units():
            yield from self._end_unit_backward(unit)
            yield from self._reduce(unit, reduces=reduces)
        yield from self.free_all()
        self._num_completed = 0

    def reduce_held(self) -> Iterator[Event]:
        """Reduce all units after a last backward that held their gradients."""
        for unit in self._reduction:
            yield from self._reduce(unit, reduces=True)

    def finish(self) -> Iterator[Event]:
        yield from self._flow.finish()

    def free_all(self) -> Iterator[Event]:
        """Free all units, and invalidate the values in permanent unshard buffers."""
        for unit in (self.order.root, *self.order.forward):
            yield from self._free(unit)
        self._contents.clear()

    def learn_order(self) -> bool:
        """Use the order in which the units ran; return whether it differs from the expected one."""
        ran = tuple(self._ran)
        if not self._learns_order or set(ran) != set(self.order.forward):
            return False
        self._learns_order = False
        if ran == self.order.forward:
            return False
        self.use_order(replace(self.order, forward=ran))
        return True

    def _unshard(self, unit: str, ahead: Sequence[str] = ()) -> Iterator[Event]:
        """Gather a unit, after freeing its buffer, and the units `ahead`; wait for the unit.

        The gathers of `ahead` start before the wait, so that they overlap with the unit's work.
        """
        if not self.strategy.shards_params:
            return
        if unit not in self._unsharded and unit not in self._gathering:
            occupant = self._occupants.get(self._buffer_of.get(unit, unit))
            if occupant in self._running:
                problem = f"is called inside {occupant}, with which it shares memory"
                raise ModuleError(
                    f"{unit} {problem}; pass units= so that neither is part of the other's forward"
                )
            if occupant is not None:
                yield from self._free(occupant)
            yield from self._gather(unit)
        yield from self._prefetch(ahead)
        if unit in self._gathering:
            self._mark_unsharded(unit)
            yield Event(EventKind.READY, unit)

    def _prefetch(self, units: Sequence[str]) -> Iterator[Event]:
        """Gather units that will be used soon, up to the first whose unshard buffer is in use."""
        for unit in units:
            if unit not in self._unsharded and unit not in self._gathering:
                if self._buffer_of.get(unit, unit) in self._occupants:
                    return  # skipping it would change the order of gathers, so ranks would deadlock
                yield from self._gather(unit)

    def _gather(self, unit: str) -> Iterator[Event]:
        buffer = self._buffer_of.get(unit, unit)
        self._occupants[buffer] = unit
        if self._contents.get(buffer) == unit:  # the permanent buffer still has the values
            self._unsharded.add(unit)
            yield Event(EventKind.READY, unit)
        else:
            self._contents.pop(buffer, None)
            self._gathering.add(unit)
            yield Event(EventKind.GATHER, unit)

    def _free(self, unit: str) -> Iterator[Event]:
        if unit in self._gathering or unit in self._unsharded:
            # A gather in flight fills the buffer too: `ShardedUnit.free` waits for it.
            self._mark_unsharded(unit)
            self._unsharded.discard(unit)
            del self._occupants[self._buffer_of.get(unit, unit)]
            yield Event(EventKind.FREE, unit)

    def _mark_unsharded(self, unit: str) -> None:
        self._gathering.discard(unit)
        self._unsharded.add(unit)
        if unit in self._buffer_of:
            self._contents[self._buffer_of[unit]] = unit

    def _end_unit_backward(self, unit: str) -> Iterator[Event]:
        """Free a unit whose backward is complete.

        If the unit ran in forward but had no backward on this rank, it may have one on other ranks,
        which gather it. This rank then gathers it too, since a gather needs all ranks.
        """
        self._num_completed += 1
        is_unused = unit in self._ran and unit not in self._regathered and self.order.trains(unit)
        if is_unused and self.order.is_gathered_again(unit, self.strategy):
            yield from self._unshard(unit)
        self._regathered.discard(unit)
        yield from self._free(unit)

    def _reduce(self, unit: str, *, reduces: bool) -> Iterator[Event]:
        """Reduce the complete gradients of a unit, or hold them until a later backward."""
        if not self.order.trains(unit):
            return
        if not reduces:
            self._held.add(unit)
            yield Event(EventKind.HOLD, unit)
            return
        was_held, is_first = unit in self._held, unit not in self._reduced
        yield from self._flow.start(unit, was_held=was_held, is_first=is_first)
        self._held.discard(unit)
        self._reduced.add(unit)


def step_events(schedule: Schedule, reduces: Sequence[bool] = (True,)) -> tuple[Event, ...]:
    """Plan the events of a step with a backward per entry of `reduces`: whether it reduces."""
    order = schedule.order
    events: list[Event] = []
    for reduce in reduces:
        events += schedule.begin_forward()
        for unit in order.forward:
            events += schedule.begin_unit(unit)
            events += schedule.end_unit(unit)
        completed: tuple[str, ...] = ()
        for unit in order.backward_units:
            events += schedule.begin_unit_backward(unit, completed, reduces=reduce)
            completed = (unit,)
        events += schedule.end_units(reduces=reduce)
        events += schedule.finish()
        events.append(Event(EventKind.LEAVE, order.root))
    return tuple(events)


def update_events(order: UnitOrder, strategy: Strategy) -> tuple[Event, ...]:
    """Plan the events that follow the optimizer's step."""
    if not strategy.syncs_params:
        return ()
    units = filter(order.trains, (order.root, *order.forward))
    return tuple(Event(EventKind.SYNC, unit) for unit in units)
