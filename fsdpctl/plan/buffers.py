"""The bytes that each collective of a step sends, and the buffers that are allocated for it."""

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

    unsharded_grads: int  # the input of the collective
    workspace: int  # allocated by the reduce-scatter
    sum: int  # the result on this rank
    replica_workspace: int = 0  # allocated by the second collective
    aliases_grad: bool = True  # the first sum becomes the gradient without a copy


@dataclass(frozen=True, slots=True)
class FlatBytes:
    """The gradients of one trained flat buffer, in bytes."""

    by_piece: tuple[ReductionBuffers, ...]  # reductions of one backward's gradients, by piece
    when_held: ReductionBuffers  # the reduction of gradients that were held on this rank
    grads: int  # reduced gradients that this rank stores
    reduces_in_place: bool  # the gradient is the buffer of its reduction


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """The sizes of a unit, in bytes."""

    params: int  # gathered
    unshard_buffer: int
    is_permanent: bool  # the unshard buffer is always allocated
    synced: int  # parameters that ranks send each other after a step
    flats: tuple[FlatBytes, ...]


def _workspace(plan: StepPlan, spans: Sequence[Span], rank: int) -> int:
    """Return the elements that `rank` receives in a reduce-scatter over gloo, and adds itself."""
    receives = plan.position.transport is Transport.GLOO
    return spans[rank].numel * (len(spans) - 1) if receives else 0


def _flat_bytes(plan: StepPlan, layout: FlatLayout, pieces: int) -> FlatBytes:
    dtypes, position = plan.dtypes_of(layout), plan.position
    numel = layout.shard_spans[position.rank].numel if plan.strategy.shards_grads else layout.numel
    workspace = _workspace(plan, layout.shard_spans, position.rank) * dtypes.reduce.itemsize
    sum_bytes, unsharded = numel * dtypes.gradient.itemsize, layout.numel * dtypes.reduce.itemsize
    combining = _replica_workspace(plan, layout, numel), layout.shares_per_shard == 1
    when_held = ReductionBuffers(unsharded, workspace, sum_bytes, *combining)
    by_piece: tuple[ReductionBuffers, ...] = (when_held,)
    if pieces > 1:
        sizes = [piece_span(layout, piece, pieces).numel for piece in range(pieces)]
        by_piece = tuple(piece_buffers(plan, layout, size) for size in sizes)
    grads = sum_bytes // layout.shares_per_shard
    return FlatBytes(by_piece, when_held, grads, plan.reduces_in_place(layout))


def piece_buffers(plan: StepPlan, layout: FlatLayout, size: int) -> ReductionBuffers:
    """Return the memory of a reduction in which every rank owns `size` elements of a piece."""
    dtypes, position = plan.dtypes_of(layout), plan.position
    owned = size * layout.shares_per_shard
    spans = EvenSpans(owned, position.num_shards)
    workspace = _workspace(plan, spans, position.rank) * dtypes.reduce.itemsize
    unsharded = owned * position.num_shards * dtypes.reduce.itemsize
    total = owned * dtypes.gradient.itemsize
    combining = _replica_workspace(plan, layout, owned)
    return ReductionBuffers(unsharded, workspace, total, combining, aliases_grad=False)


def _replica_workspace(plan: StepPlan, layout: FlatLayout, numel: int) -> int:
    """Return the bytes of workspace to reduce-scatter `numel` elements over the replicas."""
    if layout.shares_per_shard == 1:
        return 0
    shares = EvenSpans(numel // layout.shares_per_shard, layout.shares_per_shard)
    itemsize = plan.dtypes_of(layout).gradient.itemsize
    return _workspace(plan, shares, plan.position.replica) * itemsize


def unit_bytes(plan: StepPlan) -> dict[str, UnitBytes]:
    def synced_bytes(layout: FlatLayout) -> int:
        numel = layout.numel if layout.shares_per_shard == 1 else layout.shard_spans[0].numel
        return numel * plan.dtypes_of(layout).compute.itemsize

    units: dict[str, UnitBytes] = {}
    for buffer in plan.unshard_buffers:
        is_permanent = buffer.is_permanent or not plan.strategy.shards_params
        for name in buffer.units:
            layouts, trained = plan.layouts[name], plan.trained[name]
            params = sum(each.numel * plan.dtypes_of(each).compute.itemsize for each in layouts)
            pieces = plan.reductions.pieces.get(name, 1)
            flats = tuple(_flat_bytes(plan, each, pieces) for each in trained)
            synced = sum(map(synced_bytes, trained))
            units[name] = UnitBytes(params, buffer.nbytes, is_permanent, synced, flats)
    return units


def planned_step(plan: StepPlan, reduces: Sequence[bool]) -> list[Event]:
    """Return the events of a step with bytes and buffers; `reduces`: which backwards reduce."""
    events = _Replay(plan).replay(step_events(Schedule.of(plan), reduces))
    return list(_after_host(events, _host_step_events(plan))) if plan.steps_on_host else events


def planned_update(plan: StepPlan) -> list[Event]:
    return [] if plan.steps_on_host else _sync_events(plan)


def _sync_events(plan: StepPlan) -> list[Event]:
    return _Replay(plan).replay(update_events(plan.order, plan.strategy))


def _host_step_events(plan: StepPlan) -> dict[str, list[Event]]:
    """Return the events that follow once the host has stepped a unit, by unit."""
    waits: dict[str, list[Event]] = defaultdict(list)
    trained = plan.trained if plan.fetches_gradients else {}
    for unit, layouts in trained.items():
        for each in layouts:
            nbytes = plan.master_span(each).numel * plan.dtypes_of(each).gradient.itemsize
            waits[unit].append(Event(K.DEALLOCATE, unit, nbytes, BufferKind.OFFLOADING))
    for event in _sync_events(plan):
        waits[event.unit].append(event)
    return waits


def _after_host(events: Iterable[Event], waits: dict[str, list[Event]]) -> Iterator[Event]:
    """Yield events, with the `waits` of a unit before the unit is first gathered or used."""
    for event in events:
        gathers = event.kind is K.ALLOCATE and event.buffer is BufferKind.PARAMS
        if gathers or event.kind in (K.GATHER, K.FORWARD):
            yield from waits.pop(event.unit, ())
        yield event


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a unit's gradients that one reduction covers, by flat buffer."""

    buffers: list[ReductionBuffers]
    first: int  # the index of its first reduction
    is_last: bool  # whether the unit has no further piece

    def numbered(self) -> Iterator[tuple[int, int, ReductionBuffers]]:
        """Yield the index of each flat buffer, the index of its reduction, and the memory."""
        for flat_index, memory in enumerate(self.buffers):
            if memory.unsharded_grads:
                yield flat_index, self.first + flat_index, memory


class _Replay:
    """A replay of planned events that adds their bytes and buffers."""

    def __init__(self, plan: StepPlan) -> None:
        self.units: Mapping[str, UnitBytes] = unit_bytes(plan)
        # Whether reduced gradients are copied to the host, one unit at a time.
        self.offloads_grads = Offload.GRADIENTS in plan.offload
        self._offloaded: str | None = None  # the unit whose gradients were copied last
        self.combines = plan.combines
        # Whether the second collective is enqueued before the first is waited for.
        self.chained = plan.reductions.chained_ranks > 0
        self.events: list[Event] = []
        self._allocated: dict[tuple[BufferKind, str, int], int] = {}
        self._holding: set[str] = set()  # units whose gradients are held for a later backward
        self._next_piece: Counter[str] = Counter()
        self._reducing: dict[str, deque[_Piece]] = defaultdict(deque)
        self._combining: dict[str, deque[_Piece]] = defaultdict(deque)

    def replay(self, events: Iterable[Event]) -> list[Event]:
        """Return `events` with bytes, and events of the buffers that they allocate and free."""
        for event in events:
            self._replay_event(event.kind, event.unit, self.units[event.unit])
        return self.events

    def _replay_event(self, kind: EventKind, name: str, unit: UnitBytes) -> None:
        if kind is K.GATHER and not unit.is_permanent:
            self._allocate(BufferKind.PARAMS, name, index=0, nbytes=unit.unshard_buffer)
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
            # The LEAVE of the root ends the pass; earlier ones find nothing to free.
            self._free_offloaded(name=None)
        self.events.append(Event(kind, name, sent, is_last=piece is None or piece.is_last))
        if kind is K.FREE and not unit.is_permanent:
            self._free(BufferKind.PARAMS, name, index=0)

    def _free_offloaded(self, name: str | None) -> None:
        """Free the gradients that were copied to the host before those of unit `name`."""
        if self._offloaded is not None:
            for flat_index in range(len(self.units[self._offloaded].flats)):
                self._free(BufferKind.GRADS, self._offloaded, flat_index)
        self._offloaded = name

    def _hold(self, name: str, unit: UnitBytes) -> None:
        if name not in self._holding:
            self._holding.add(name)
            for index, flat in enumerate(unit.flats):
                nbytes = flat.when_held.unsharded_grads
                self._allocate(BufferKind.UNSHARDED_GRADS, name, index, nbytes)

    def _start(self, name: str, unit: UnitBytes) -> _Piece:
        was_held, piece_index = name in self._holding, self._next_piece[name]
        self._holding.discard(name)
        buffers = [x.when_held if was_held else x.by_piece[piece_index] for x in unit.flats]
        is_last = was_held or all(piece_index + 1 == len(each.by_piece) for each in unit.flats)
        self._next_piece[name] = 0 if is_last else piece_index + 1
        piece = _Piece(buffers, piece_index * len(unit.flats), is_last)
        for _, index, memory in piece.numbered():
            if not was_held:
                nbytes = memory.unsharded_grads
                self._allocate(BufferKind.UNSHARDED_GRADS, name, index, nbytes, is_last)
            if memory.workspace:
                self._allocate(BufferKind.WORKSPACE, name, index, memory.workspace, is_last)
        self._reducing[name].append(piece)
        return piece

    def _combine(self, name: str, piece: _Piece) -> int:
        """Start the second collective; return the bytes that this rank sends."""
        for _, index, memory in piece.numbered() if self.chained else ():
            self._allocate(BufferKind.SUM, name, index, memory.sum)
        for _, index, memory in piece.numbered():
            if memory.replica_workspace:
                self._allocate(BufferKind.REPLICA_WORKSPACE, name, index, memory.replica_workspace)
        return sum(each.sum for each in piece.buffers)

    def _finish(self, name: str, unit: UnitBytes, piece: _Piece) -> None:
        # The order is that of the engine: it decides the peak.
        for flat_index, index, memory in piece.numbered():
            flat = unit.flats[flat_index]
            if flat.reduces_in_place:
                self._free(BufferKind.UNSHARDED_GRADS, name, index, into=(BufferKind.SUM, index))
            if not self.chained:
                self._allocate(BufferKind.SUM, name, index, memory.sum)
            if (BufferKind.WORKSPACE, name, index) in self._allocated:
                self._free(BufferKind.WORKSPACE, name, index)
            if not flat.reduces_in_place:
                self._free(BufferKind.UNSHARDED_GRADS, name, index)

    def _accumulate(self, name: str, unit: UnitBytes, piece: _Piece) -> None:
        for flat_index, index, memory in piece.numbered():
            grads = unit.flats[flat_index].grads
            is_new = (BufferKind.GRADS, name, flat_index) not in self._allocated
            aliases_grad = is_new and memory.aliases_grad
            if memory.replica_workspace:
                self._free(BufferKind.REPLICA_WORKSPACE, name, index)
            if aliases_grad:
                self._free(BufferKind.SUM, name, index, into=(BufferKind.GRADS, flat_index))
            if is_new:
                self._allocate(BufferKind.GRADS, name, flat_index, grads)
            if not aliases_grad:
                self._free(BufferKind.SUM, name, index)
        is_partial = self._reducing[name] or self._combining[name] or self._next_piece[name]
        if self.offloads_grads and not is_partial:
            self._free_offloaded(name)

    def _allocate(
        self, buffer: BufferKind, name: str, index: int, nbytes: int, is_last: bool = True
    ) -> None:
        self._allocated[buffer, name, index] = nbytes
        self.events.append(Event(K.ALLOCATE, name, nbytes, buffer, index, is_last=is_last))

    def _free(
        self, buffer: BufferKind, name: str, index: int, into: tuple[BufferKind, int] | None = None
    ) -> None:
        nbytes = self._allocated.pop((buffer, name, index))
        self.events.append(Event(K.DEALLOCATE, name, nbytes, buffer, index, into))
