"""The buffers of a step: what each collective sends, and the memory that it needs meanwhile."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdpctl.plan.layout import EvenSpans, FlatLayout, Span
from fsdpctl.plan.schedule import BufferKind, Event, EventKind, Schedule, step_events, update_events
from fsdpctl.plan.step_plan import StepPlan, Transport, piece_span
from fsdpctl.plan.strategy import Offload

K = EventKind


@dataclass(frozen=True, slots=True)
class ReductionBuffers:
    """The memory of a reduction on this rank, in bytes."""

    unsharded_grads: int  # to be sent
    workspace: int
    sum: int  # the result on this rank
    replica_workspace: int = 0  # workspace of the second collective
    aliases_grad: bool = True  # the sum can be the gradient, if there is none yet


@dataclass(frozen=True, slots=True)
class FlatBytes:
    """One trained flat buffer of a unit, in bytes."""

    by_piece: tuple[ReductionBuffers, ...]  # gradients of one backward, by piece
    held: ReductionBuffers  # gradients accumulated on this rank
    grads: int  # reduced, as this rank keeps them
    reduces_in_place: bool  # the gradient is the buffer of its reduction


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """The sizes of a unit, in bytes."""

    params: int  # gathered
    unshard_buffer: int  # that it is gathered into
    is_permanent: bool  # the slot is always allocated
    synced: int  # parameters that ranks renew after a step
    flats: tuple[FlatBytes, ...]


def _workspace(plan: StepPlan, parts: Sequence[Span], rank: int) -> int:
    """Return the elements that a reduce-scatter allocates on `rank`: what others send over gloo."""
    if plan.position.transport is not Transport.GLOO:
        return 0
    return parts[rank].numel * (len(parts) - 1)


def _flat_bytes(plan: StepPlan, layout: FlatLayout, pieces: int) -> FlatBytes:
    dtypes, place = plan.dtypes_of(layout), plan.position
    kept = layout.shard_spans[place.rank].numel if plan.strategy.shards_grads else layout.numel
    workspace = _workspace(plan, layout.shard_spans, place.rank) * dtypes.reduce.itemsize
    total, whole = kept * dtypes.gradient.itemsize, layout.numel * dtypes.reduce.itemsize
    combining, becomes = _combining(plan, layout, kept), layout.shares_per_shard == 1
    held = ReductionBuffers(
        whole, 0 if plan.uses_all_reduce else workspace, total, combining, becomes
    )
    fresh: tuple[ReductionBuffers, ...] = (held,)
    if pieces > 1:
        shares = [piece_span(layout, piece, pieces).numel for piece in range(pieces)]
        fresh = tuple(_collected(plan, layout, share) for share in shares)
    return FlatBytes(fresh, held, total // layout.shares_per_shard, plan.reduces_in_place(layout))


def _collected(plan: StepPlan, layout: FlatLayout, share: int) -> ReductionBuffers:
    """Return the memory of one of several pieces, of which every rank owns `share` elements."""
    dtypes, place = plan.dtypes_of(layout), plan.position
    own = share * layout.shares_per_shard
    workspace = _workspace(plan, EvenSpans(own, place.size), place.rank) * dtypes.reduce.itemsize
    whole = own * place.size * dtypes.reduce.itemsize
    total = own * dtypes.gradient.itemsize
    return ReductionBuffers(
        whole, workspace, total, _combining(plan, layout, own), aliases_grad=False
    )


def _combining(plan: StepPlan, layout: FlatLayout, numel: int) -> int:
    """Return the bytes of workspace to divide a sum of `numel` elements over the replicas."""
    if layout.shares_per_shard == 1:
        return 0
    shares = EvenSpans(numel // layout.shares_per_shard, layout.shares_per_shard)
    return (
        _workspace(plan, shares, plan.position.replica) * plan.dtypes_of(layout).gradient.itemsize
    )


def unit_bytes(plan: StepPlan) -> dict[str, UnitBytes]:
    def renewed(layout: FlatLayout) -> int:
        numel = layout.numel if layout.shares_per_shard == 1 else layout.shard_spans[0].numel
        return numel * plan.dtypes_of(layout).compute.itemsize

    return {
        name: UnitBytes(
            sum(each.numel * plan.dtypes_of(each).compute.itemsize for each in plan.layouts[name]),
            slot.nbytes,
            slot.is_permanent or not plan.strategy.shards_params,
            sum(map(renewed, plan.trained[name])),
            tuple(
                _flat_bytes(plan, each, plan.reductions.pieces.get(name, 1))
                for each in plan.trained[name]
            ),
        )
        for slot in plan.unshard_buffers
        for name in slot.units
    }


def planned_step(plan: StepPlan, reduces: Sequence[bool]) -> list[Event]:
    """Return the events of a step, with their bytes and buffers.

    Each entry of `reduces` is a pass, and whether its backward reduces gradients.
    """
    played = _Replay(plan).replay(step_events(Schedule.of(plan), reduces))
    return list(_after_host(played, _host_waits(plan))) if plan.steps_on_host else played


def planned_update(plan: StepPlan) -> list[Event]:
    return [] if plan.steps_on_host else _sync_events(plan)


def _sync_events(plan: StepPlan) -> list[Event]:
    return _Replay(plan).replay(update_events(plan.order, plan.strategy))


def _host_waits(plan: StepPlan) -> dict[str, list[Event]]:
    """Return the events once the host has stepped a unit, by unit."""
    waits: dict[str, list[Event]] = defaultdict(list)
    for unit, layouts in plan.trained.items() if plan.fetches_gradients else ():
        for each in layouts:
            nbytes = plan.master_span(each).numel * plan.dtypes_of(each).gradient.itemsize
            waits[unit].append(Event(K.DEALLOCATE, unit, nbytes, BufferKind.OFFLOADING))
    for event in _sync_events(plan):
        waits[event.unit].append(event)
    return waits


def _after_host(events: Iterable[Event], waits: dict[str, list[Event]]) -> Iterator[Event]:
    """Yield events, and those for which the engine waits before it gathers or uses a unit."""
    for event in events:
        gathers = event.kind is K.ALLOCATE and event.buffer is BufferKind.PARAMS
        if gathers or event.kind in (K.GATHER, K.FORWARD):
            yield from waits.pop(event.unit, ())
        yield event


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a unit that one reduction covers, of each of its flat buffers."""

    buffers: list[ReductionBuffers]
    first: int  # the number of its first buffer
    is_last: bool  # of the unit

    def numbered(self) -> Iterator[tuple[int, int, ReductionBuffers]]:
        """Yield the number of each flat buffer with a sending, that of the sending, and itself."""
        for number, sending in enumerate(self.buffers):
            if sending.unsharded_grads:
                yield number, self.first + number, sending


class _Replay:
    """Adds bytes and buffers to planned events."""

    def __init__(self, plan: StepPlan) -> None:
        self.units: Mapping[str, UnitBytes] = unit_bytes(plan)
        # Whether gradients go to the host once they are reduced, one unit at a time.
        self.offloads_grads = Offload.GRADIENTS in plan.offload
        self._offloaded: str | None = None  # the last unit of which they went
        self.combines = plan.combines
        # Whether the second collective follows before the first is waited for.
        self.chained = plan.reductions.chained > 0
        self.events: list[Event] = []
        self._held: dict[tuple[BufferKind, str, int], int] = {}
        self._holding: set[str] = set()  # units whose gradients wait for a later backward
        self._next_piece: Counter[str] = Counter()
        self._reducing: dict[str, deque[_Piece]] = defaultdict(deque)
        self._combining: dict[str, deque[_Piece]] = defaultdict(deque)

    def replay(self, events: Iterable[Event]) -> list[Event]:
        """Return `events` with bytes, and with the buffers that they allocate and free."""
        for event in events:
            self._replay_event(event.kind, event.unit, self.units[event.unit])
        return self.events

    def _replay_event(self, kind: EventKind, name: str, unit: UnitBytes) -> None:
        if kind is K.GATHER and not unit.is_permanent:
            self._allocate(BufferKind.PARAMS, name, 0, unit.unshard_buffer)
        sent = {K.GATHER: unit.params, K.SYNC: unit.synced}.get(kind, 0)
        piece: _Piece | None = None
        if kind is K.HOLD:
            self._hold(name, unit)
        elif kind is K.REDUCE:
            piece = self._start(name, unit)
            sent = sum(each.unsharded_grads for each in piece.buffers)
        elif kind is K.REDUCED:
            piece = self._reducing[name].popleft()
            self._finish(name, unit, piece)
            if not self.combines:
                self._accumulate(name, unit, piece)
            elif not self.chained:
                self._combining[name].append(piece)
        elif kind is K.COMBINE:
            if self.chained:
                self._combining[name].append(self._reducing[name][-1])
            piece = self._combining[name][-1]
            sent = self._combine(name, piece)
        elif kind is K.COMBINED:
            piece = self._combining[name].popleft()
            self._accumulate(name, unit, piece)
        elif kind is K.LEAVE:
            self._free_offloaded(None)
        self.events.append(Event(kind, name, sent, is_last=piece is None or piece.is_last))
        if kind is K.FREE and not unit.is_permanent:
            self._free(BufferKind.PARAMS, name, 0)

    def _free_offloaded(self, name: str | None) -> None:
        """Free the gradients that went to the host before those of unit `name`."""
        if self._offloaded is not None:
            for number in range(len(self.units[self._offloaded].flats)):
                self._free(BufferKind.GRADS, self._offloaded, number)
        self._offloaded = name

    def _hold(self, name: str, unit: UnitBytes) -> None:
        if name not in self._holding:
            self._holding.add(name)
            for index, flat in enumerate(unit.flats):
                self._allocate(BufferKind.UNSHARDED_GRADS, name, index, flat.held.unsharded_grads)

    def _start(self, name: str, unit: UnitBytes) -> _Piece:
        was_held, number = name in self._holding, self._next_piece[name]
        self._holding.discard(name)
        sendings = [each.held if was_held else each.by_piece[number] for each in unit.flats]
        is_last = was_held or all(number + 1 == len(each.by_piece) for each in unit.flats)
        self._next_piece[name] = 0 if is_last else number + 1
        piece = _Piece(sendings, number * len(unit.flats), is_last)
        for _, index, sending in piece.numbered():
            if not was_held:
                self._allocate(
                    BufferKind.UNSHARDED_GRADS, name, index, sending.unsharded_grads, is_last
                )
            if sending.workspace:
                self._allocate(BufferKind.WORKSPACE, name, index, sending.workspace, is_last)
        self._reducing[name].append(piece)
        return piece

    def _combine(self, name: str, piece: _Piece) -> int:
        """Start the second collective and return the bytes that are sent."""
        for _, index, sending in piece.numbered() if self.chained else ():
            self._allocate(BufferKind.SUM, name, index, sending.sum)
        for _, index, sending in piece.numbered():
            if sending.replica_workspace:
                self._allocate(BufferKind.REPLICA_WORKSPACE, name, index, sending.replica_workspace)
        return sum(each.sum for each in piece.buffers)

    def _finish(self, name: str, unit: UnitBytes, piece: _Piece) -> None:
        for number, index, sending in piece.numbered():
            flat = unit.flats[number]
            if flat.reduces_in_place:
                self._free(BufferKind.UNSHARDED_GRADS, name, index, into=(BufferKind.SUM, index))
            if not self.chained:
                self._allocate(BufferKind.SUM, name, index, sending.sum)
            if (BufferKind.WORKSPACE, name, index) in self._held:
                self._free(BufferKind.WORKSPACE, name, index)
            if not flat.reduces_in_place:
                self._free(BufferKind.UNSHARDED_GRADS, name, index)

    def _accumulate(self, name: str, unit: UnitBytes, piece: _Piece) -> None:
        for number, index, sending in piece.numbered():
            grads, is_new = (
                unit.flats[number].grads,
                (BufferKind.GRADS, name, number) not in self._held,
            )
            becomes = is_new and sending.aliases_grad
            if sending.replica_workspace:
                self._free(BufferKind.REPLICA_WORKSPACE, name, index)
            if becomes:
                self._free(BufferKind.SUM, name, index, into=(BufferKind.GRADS, number))
            if is_new:
                self._allocate(BufferKind.GRADS, name, number, grads)
            if not becomes:
                self._free(BufferKind.SUM, name, index)
        waiting = self._reducing[name] or self._combining[name] or self._next_piece[name]
        if self.offloads_grads and not waiting:
            self._free_offloaded(name)

    def _allocate(
        self, buffer: BufferKind, name: str, index: int, nbytes: int, is_last: bool = True
    ) -> None:
        self._held[buffer, name, index] = nbytes
        self.events.append(Event(K.ALLOCATE, name, nbytes, buffer, index, is_last=is_last))

    def _free(
        self, buffer: BufferKind, name: str, index: int, into: tuple[BufferKind, int] | None = None
    ) -> None:
        nbytes = self._held.pop((buffer, name, index))
        self.events.append(Event(K.DEALLOCATE, name, nbytes, buffer, index, into))
