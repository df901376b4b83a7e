"""The buffers of a step: what each collective sends, and the memory that it needs meanwhile."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdpctl.plan.layout import EvenParts, FlatLayout, Span
from fsdpctl.plan.schedule import Buffer, Event, EventKind, Schedule, step_events, update_events
from fsdpctl.plan.step_plan import StepPlan, Transport, share_of_parts
from fsdpctl.plan.strategy import Offload

K = EventKind


@dataclass(frozen=True, slots=True)
class Sending:
    """The memory of a reduction on this rank, in bytes."""

    whole_grads: int  # to be sent
    workspace: int
    sum: int  # the result on this rank
    combining: int = 0  # workspace of the second collective
    becomes: bool = True  # the sum can be the gradient, if there is none yet


@dataclass(frozen=True, slots=True)
class FlatBytes:
    """One trained flat buffer of a unit, in bytes."""

    fresh: tuple[Sending, ...]  # gradients of one backward, by piece
    held: Sending  # gradients accumulated on this rank
    grads: int  # reduced, as this rank keeps them
    in_place: bool  # the gradient is the buffer of its reduction


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """The sizes of a unit, in bytes."""

    params: int  # gathered
    slot: int  # that it is gathered into
    resident: bool  # the slot is always allocated
    renewed: int  # parameters that ranks renew after a step
    flats: tuple[FlatBytes, ...]


def _workspace(plan: StepPlan, parts: Sequence[Span], rank: int) -> int:
    """Return the elements that a reduce-scatter allocates on `rank`: what others send over gloo."""
    if plan.place.transport is not Transport.GLOO:
        return 0
    return parts[rank].numel * (len(parts) - 1)


def _flat_bytes(plan: StepPlan, layout: FlatLayout, pieces: int) -> FlatBytes:
    dtypes, place = plan.dtypes_of(layout), plan.place
    kept = layout.parts[place.rank].numel if plan.strategy.shards_grads else layout.numel
    workspace = _workspace(plan, layout.parts, place.rank) * dtypes.reduce.itemsize
    total, whole = kept * dtypes.gradient.itemsize, layout.numel * dtypes.reduce.itemsize
    combining, becomes = _combining(plan, layout, kept), layout.shares == 1
    held = Sending(whole, 0 if plan.adds_whole else workspace, total, combining, becomes)
    fresh: tuple[Sending, ...] = (held,)
    if pieces > 1:
        shares = [share_of_parts(layout, piece, pieces).numel for piece in range(pieces)]
        fresh = tuple(_collected(plan, layout, share) for share in shares)
    return FlatBytes(fresh, held, total // layout.shares, plan.becomes_gradient(layout))


def _collected(plan: StepPlan, layout: FlatLayout, share: int) -> Sending:
    """Return the memory of one of several pieces, of which every rank owns `share` elements."""
    dtypes, place = plan.dtypes_of(layout), plan.place
    own = share * layout.shares
    workspace = _workspace(plan, EvenParts(own, place.size), place.rank) * dtypes.reduce.itemsize
    whole = own * place.size * dtypes.reduce.itemsize
    total = own * dtypes.gradient.itemsize
    return Sending(whole, workspace, total, _combining(plan, layout, own), becomes=False)


def _combining(plan: StepPlan, layout: FlatLayout, numel: int) -> int:
    """Return the bytes of workspace to divide a sum of `numel` elements over the replicas."""
    if layout.shares == 1:
        return 0
    shares = EvenParts(numel // layout.shares, layout.shares)
    return _workspace(plan, shares, plan.place.replica) * plan.dtypes_of(layout).gradient.itemsize


def unit_bytes(plan: StepPlan) -> dict[str, UnitBytes]:
    def renewed(layout: FlatLayout) -> int:
        numel = layout.numel if layout.shares == 1 else layout.parts[0].numel
        return numel * plan.dtypes_of(layout).compute.itemsize

    return {
        name: UnitBytes(
            sum(each.numel * plan.dtypes_of(each).compute.itemsize for each in plan.layouts[name]),
            slot.nbytes,
            slot.resident or not plan.strategy.shards_params,
            sum(map(renewed, plan.trained[name])),
            tuple(
                _flat_bytes(plan, each, plan.reductions.pieces.get(name, 1))
                for each in plan.trained[name]
            ),
        )
        for slot in plan.slots
        for name in slot.units
    }


def planned_step(plan: StepPlan, reduces: Sequence[bool]) -> list[Event]:
    """Return the events of a step, with their bytes and buffers.

    Each entry of `reduces` is a pass, and whether its backward reduces gradients.
    """
    played = _Replay(plan).play(step_events(Schedule.of(plan), reduces))
    return list(_after_host(played, _host_waits(plan))) if plan.steps_on_host else played


def planned_update(plan: StepPlan) -> list[Event]:
    return [] if plan.steps_on_host else _renewing(plan)


def _renewing(plan: StepPlan) -> list[Event]:
    return _Replay(plan).play(update_events(plan.order, plan.strategy))


def _host_waits(plan: StepPlan) -> dict[str, list[Event]]:
    """Return the events once the host has stepped a unit, by unit."""
    waits: dict[str, list[Event]] = defaultdict(list)
    for unit, layouts in plan.trained.items() if plan.fetches_gradients else ():
        for each in layouts:
            nbytes = plan.held(each).numel * plan.dtypes_of(each).gradient.itemsize
            waits[unit].append(Event(K.FREE, unit, nbytes, Buffer.LEAVING))
    for event in _renewing(plan):
        waits[event.unit].append(event)
    return waits


def _after_host(events: Iterable[Event], waits: dict[str, list[Event]]) -> Iterator[Event]:
    """Yield events, and those for which the engine waits before it gathers or uses a unit."""
    for event in events:
        gathers = event.kind is K.ALLOCATE and event.buffer is Buffer.PARAMS
        if gathers or event.kind in (K.GATHER, K.FORWARD):
            yield from waits.pop(event.unit, ())
        yield event


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a unit that one reduction covers, of each of its flat buffers."""

    sendings: list[Sending]
    first: int  # the number of its first buffer
    is_last: bool  # of the unit

    def numbered(self) -> Iterator[tuple[int, int, Sending]]:
        """Yield the number of each flat buffer with a sending, that of the sending, and itself."""
        for number, sending in enumerate(self.sendings):
            if sending.whole_grads:
                yield number, self.first + number, sending


class _Replay:
    """Adds bytes and buffers to planned events."""

    def __init__(self, plan: StepPlan) -> None:
        self.units: Mapping[str, UnitBytes] = unit_bytes(plan)
        # Whether gradients go to the host once they are reduced, one unit at a time.
        self.leaves = Offload.GRADIENTS in plan.offload
        self._left: str | None = None  # the last unit of which they went
        self.combines = plan.combines
        # Whether the second collective follows before the first is waited for.
        self.chained = plan.reductions.chained > 0
        self.events: list[Event] = []
        self._held: dict[tuple[Buffer, str, int], int] = {}
        self._holding: set[str] = set()  # units whose gradients wait for a later backward
        self._next_piece: Counter[str] = Counter()
        self._reducing: dict[str, deque[_Piece]] = defaultdict(deque)
        self._combining: dict[str, deque[_Piece]] = defaultdict(deque)

    def play(self, events: Iterable[Event]) -> list[Event]:
        """Return `events` with bytes, and with the buffers that they allocate and free."""
        for event in events:
            self._play(event.kind, event.unit, self.units[event.unit])
        return self.events

    def _play(self, kind: EventKind, name: str, unit: UnitBytes) -> None:
        if kind is K.GATHER and not unit.resident:
            self._allocate(Buffer.PARAMS, name, 0, unit.slot)
        sent = {K.GATHER: unit.params, K.SYNC: unit.renewed}.get(kind, 0)
        piece: _Piece | None = None
        if kind is K.HOLD:
            self._hold(name, unit)
        elif kind is K.REDUCE:
            piece = self._start(name, unit)
            sent = sum(each.whole_grads for each in piece.sendings)
        elif kind is K.REDUCED:
            piece = self._reducing[name].popleft()
            self._finish(name, unit, piece)
            if not self.combines:
                self._settle(name, unit, piece)
            elif not self.chained:
                self._combining[name].append(piece)
        elif kind is K.COMBINE:
            if self.chained:
                self._combining[name].append(self._reducing[name][-1])
            piece = self._combining[name][-1]
            sent = self._combine(name, piece)
        elif kind is K.COMBINED:
            piece = self._combining[name].popleft()
            self._settle(name, unit, piece)
        elif kind is K.LEAVE:
            self._leave(None)
        self.events.append(Event(kind, name, sent, is_last=piece is None or piece.is_last))
        if kind is K.RELEASE and not unit.resident:
            self._free(Buffer.PARAMS, name, 0)

    def _leave(self, name: str | None) -> None:
        """Free the gradients that went to the host before those of unit `name`."""
        if self._left is not None:
            for number in range(len(self.units[self._left].flats)):
                self._free(Buffer.GRADS, self._left, number)
        self._left = name

    def _hold(self, name: str, unit: UnitBytes) -> None:
        if name not in self._holding:
            self._holding.add(name)
            for index, flat in enumerate(unit.flats):
                self._allocate(Buffer.WHOLE_GRADS, name, index, flat.held.whole_grads)

    def _start(self, name: str, unit: UnitBytes) -> _Piece:
        was_held, number = name in self._holding, self._next_piece[name]
        self._holding.discard(name)
        sendings = [each.held if was_held else each.fresh[number] for each in unit.flats]
        is_last = was_held or all(number + 1 == len(each.fresh) for each in unit.flats)
        self._next_piece[name] = 0 if is_last else number + 1
        piece = _Piece(sendings, number * len(unit.flats), is_last)
        for _, index, sending in piece.numbered():
            if not was_held:
                self._allocate(Buffer.WHOLE_GRADS, name, index, sending.whole_grads, is_last)
            if sending.workspace:
                self._allocate(Buffer.WORKSPACE, name, index, sending.workspace, is_last)
        self._reducing[name].append(piece)
        return piece

    def _combine(self, name: str, piece: _Piece) -> int:
        """Start the second collective and return the bytes that are sent."""
        for _, index, sending in piece.numbered() if self.chained else ():
            self._allocate(Buffer.SUM, name, index, sending.sum)
        for _, index, sending in piece.numbered():
            if sending.combining:
                self._allocate(Buffer.COMBINING, name, index, sending.combining)
        return sum(each.sum for each in piece.sendings)

    def _finish(self, name: str, unit: UnitBytes, piece: _Piece) -> None:
        for number, index, sending in piece.numbered():
            flat = unit.flats[number]
            if flat.in_place:
                self._free(Buffer.WHOLE_GRADS, name, index, into=(Buffer.SUM, index))
            if not self.chained:
                self._allocate(Buffer.SUM, name, index, sending.sum)
            if (Buffer.WORKSPACE, name, index) in self._held:
                self._free(Buffer.WORKSPACE, name, index)
            if not flat.in_place:
                self._free(Buffer.WHOLE_GRADS, name, index)

    def _settle(self, name: str, unit: UnitBytes, piece: _Piece) -> None:
        for number, index, sending in piece.numbered():
            grads, is_new = unit.flats[number].grads, (Buffer.GRADS, name, number) not in self._held
            becomes = is_new and sending.becomes
            if sending.combining:
                self._free(Buffer.COMBINING, name, index)
            if becomes:
                self._free(Buffer.SUM, name, index, into=(Buffer.GRADS, number))
            if is_new:
                self._allocate(Buffer.GRADS, name, number, grads)
            if not becomes:
                self._free(Buffer.SUM, name, index)
        waiting = self._reducing[name] or self._combining[name] or self._next_piece[name]
        if self.leaves and not waiting:
            self._leave(name)

    def _allocate(
        self, buffer: Buffer, name: str, index: int, nbytes: int, is_last: bool = True
    ) -> None:
        self._held[buffer, name, index] = nbytes
        self.events.append(Event(K.ALLOCATE, name, nbytes, buffer, index, is_last=is_last))

    def _free(
        self, buffer: Buffer, name: str, index: int, into: tuple[Buffer, int] | None = None
    ) -> None:
        nbytes = self._held.pop((buffer, name, index))
        self.events.append(Event(K.FREE, name, nbytes, buffer, index, into))
