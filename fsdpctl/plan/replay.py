"""Events with their bytes: what each collective sends, and which buffers come and go with it."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdpctl.plan.layout import EvenParts, FlatLayout
from fsdpctl.plan.reductions import Reductions, share_of_parts
from fsdpctl.plan.schedule import Buffer, Event, EventKind
from fsdpctl.plan.slots import SlotSpec
from fsdpctl.plan.strategy import Strategy
from fsdpctl.plan.transport import (
    Transport,
    adds_whole,
    exchanges,
    gradient_stretches,
    reduce_workspace,
    sends_in_place,
)

K = EventKind


@dataclass(frozen=True, slots=True)
class Itemsizes:
    """Bytes of one element."""

    param: int  # gathered, and computed with
    reduce: int  # gradients while they are added over ranks
    master: int  # what the optimizer updates, its states, and reduced gradients
    wire: int | None = None  # gradients of one backward on their way; None: what the transport does


def wire_itemsize(
    layout: FlatLayout, strategy: Strategy, sizes: Itemsizes, transport: Transport
) -> int:
    """Bytes of an element of one backward's gradients, where each rank gets its part of the sum.

    What ranks keep whole may differ in what was held back before; it has the dtype of the sum.
    """
    if not strategy.shards_params:
        return sizes.reduce
    if sends_in_place(transport, layout.parts):
        return sizes.wire or min(sizes.param, sizes.reduce)
    return sizes.wire or sizes.reduce if transport is Transport.NCCL else sizes.reduce


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Whose buffers are meant."""

    rank: int  # among those that share a copy
    size: int  # how many those are
    num_replicas: int
    transport: Transport

    def combines(self, strategy: Strategy) -> bool:
        """Whether a reduction is followed by a second collective."""
        puts_together = not strategy.shards_grads and not adds_whole(self.transport, self.size)
        return self.num_replicas > 1 or (self.size > 1 and puts_together)

    def collects(self, strategy: Strategy) -> bool:
        """Whether gradients of one backward are brought together before they are split."""
        in_place = sends_in_place(self.transport, EvenParts(1, self.size))
        return strategy.shards_params and self.size > 1 and not in_place

    def chained(self, strategy: Strategy) -> int:
        """As in `Reductions`: over NCCL the copies' sum follows on streams of its own."""
        follows = strategy.replicates and self.num_replicas > 1
        return self.size if follows and self.transport is Transport.NCCL else 0

    def stays(self, strategy: Strategy, sizes: Itemsizes) -> bool:
        """Whether a sum stays in the buffer that it was added in, without more memory."""
        adds = self.size > 1 and adds_whole(self.transport, self.size)
        return adds and not strategy.shards_grads and sizes.reduce == sizes.master


@dataclass(frozen=True, slots=True)
class Sending:
    """What a reduction holds on this rank, in bytes."""

    whole_grads: int  # to be sent
    workspace: int
    sum: int  # what it gives this rank


@dataclass(frozen=True, slots=True)
class FlatBytes:
    """One trained flat buffer of a unit, in bytes."""

    fresh: tuple[Sending, ...]  # gradients of one backward, by piece
    held: Sending  # gradients that were added up on this rank first
    grads: int  # reduced, as this rank keeps them
    in_place: bool  # the reduced gradient is the memory it was reduced in


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """A unit, in bytes."""

    params: int  # gathered
    slot: int  # what it is gathered into
    resident: bool  # the slot is there all the time
    flats: tuple[FlatBytes, ...]


def _flat_bytes(
    layout: FlatLayout, pieces: int, strategy: Strategy, sizes: Itemsizes, place: RankPlace
) -> FlatBytes:
    kept = layout.parts[place.rank].numel if strategy.shards_grads else layout.numel
    workspace = reduce_workspace(place.transport, layout.parts, place.rank)
    if not strategy.shards_grads and adds_whole(place.transport, place.size):
        workspace = 0
    total = kept * sizes.master
    held = Sending(layout.numel * sizes.reduce, workspace * sizes.reduce, total)
    fresh: tuple[Sending, ...] = (held,)
    itemsize = wire_itemsize(layout, strategy, sizes, place.transport)
    if strategy.shards_grads and sends_in_place(place.transport, layout.parts):
        sent = sum(span.numel for span, _ in gradient_stretches(layout))
        fresh = (Sending(sent * itemsize, workspace * itemsize, total),)
    elif place.collects(strategy):
        shares = [share_of_parts(layout, piece, pieces).numel for piece in range(pieces)]
        fresh = tuple(_collected(share, itemsize, sizes, place) for share in shares)
    keeps = place.size == 1 or not strategy.shards_grads
    return FlatBytes(fresh, held, total, keeps and sizes.reduce == sizes.master)


def _collected(share: int, itemsize: int, sizes: Itemsizes, place: RankPlace) -> Sending:
    """Of every rank's part `share` elements."""
    whole = share * place.size * itemsize
    workspace = share * itemsize if place.transport is Transport.GLOO else 0
    if exchanges(place.transport, itemsize, sizes.reduce):
        workspace = whole
    return Sending(whole, workspace, share * sizes.master)


def unit_bytes(
    layouts: Mapping[str, Sequence[FlatLayout]],
    slots: Iterable[SlotSpec],
    strategy: Strategy,
    sizes: Itemsizes,
    place: RankPlace,
    reductions: Reductions,
) -> dict[str, UnitBytes]:
    """Every unit as one rank sees it."""

    return {
        name: UnitBytes(
            sum(layout.numel for layout in layouts[name]) * sizes.param,
            slot.nbytes,
            slot.resident or strategy.keeps_whole_params,
            tuple(
                _flat_bytes(each, reductions.pieces.get(name, 1), strategy, sizes, place)
                for each in layouts[name]
                if each.params[0].trainable
            ),
        )
        for slot in slots
        for name in slot.units
    }


@dataclass(frozen=True, slots=True)
class _Piece:
    """What is reduced together of a unit: of each of its flat buffers something, or nothing."""

    sendings: list[Sending]
    first: int  # the number of its first buffer

    def numbered(self) -> Iterator[tuple[int, int, Sending]]:
        """The number of each flat buffer, of what is sent of it, and that, if it is anything."""
        for number, sending in enumerate(self.sendings):
            if sending.whole_grads:
                yield number, self.first + number, sending


class Replay:
    """Writes planned events down again with everything that has bytes."""

    def __init__(
        self, units: Mapping[str, UnitBytes], *, combines: bool, chained: bool = False
    ) -> None:
        self.units = units
        self.combines = combines
        self.chained = chained  # the second collective follows before the first is waited for
        self.events: list[Event] = []
        self._held: dict[tuple[Buffer, str, int], int] = {}
        self._holding: set[str] = set()  # units whose gradients wait for a later backward
        self._next_piece: Counter[str] = Counter()
        self._reducing: dict[str, deque[_Piece]] = defaultdict(deque)
        self._combining: dict[str, deque[_Piece]] = defaultdict(deque)

    def play(self, events: Iterable[Event]) -> list[Event]:
        """`events` with bytes, and what they allocate and free."""
        for event in events:
            self._play(event.kind, event.unit, self.units[event.unit])
        return self.events

    def _play(self, kind: EventKind, name: str, unit: UnitBytes) -> None:
        if kind is K.GATHER and not unit.resident:
            self._allocate(Buffer.PARAMS, name, 0, unit.slot)
        sent = unit.params if kind in (K.GATHER, K.SYNC) else 0
        if kind is K.HOLD:
            self._hold(name, unit)
        elif kind is K.REDUCE:
            sent = self._start(name, unit)
        elif kind is K.REDUCED:
            piece = self._reducing[name].popleft()
            self._finish(name, unit, piece)
            if not self.combines:
                self._settle(name, unit, piece)
            elif not self.chained:
                self._combining[name].append(piece)
        elif kind is K.COMBINE:
            if self.chained:
                self._chain(name)
            sent = sum(each.sum for each in self._combining[name][-1].sendings)
        elif kind is K.COMBINED:
            self._settle(name, unit, self._combining[name].popleft())
        self.events.append(Event(kind, name, sent))
        if kind is K.RELEASE and not unit.resident:
            self._free(Buffer.PARAMS, name, 0)

    def _hold(self, name: str, unit: UnitBytes) -> None:
        if name not in self._holding:
            self._holding.add(name)
            for index, flat in enumerate(unit.flats):
                self._allocate(Buffer.WHOLE_GRADS, name, index, flat.held.whole_grads)

    def _start(self, name: str, unit: UnitBytes) -> int:
        """The bytes that are sent."""
        was_held, number = name in self._holding, self._next_piece[name]
        self._holding.discard(name)
        sendings = [each.held if was_held else each.fresh[number] for each in unit.flats]
        is_last = was_held or all(number + 1 == len(each.fresh) for each in unit.flats)
        self._next_piece[name] = 0 if is_last else number + 1
        piece = _Piece(sendings, number * len(unit.flats))
        for _, index, sending in piece.numbered():
            if not was_held:
                self._allocate(Buffer.WHOLE_GRADS, name, index, sending.whole_grads)
            if sending.workspace:
                self._allocate(Buffer.WORKSPACE, name, index, sending.workspace)
        self._reducing[name].append(piece)
        return sum(each.whole_grads for each in sendings)

    def _chain(self, name: str) -> None:
        piece = self._reducing[name][-1]
        for _, index, sending in piece.numbered():
            self._allocate(Buffer.SUM, name, index, sending.sum)
        self._combining[name].append(piece)

    def _finish(self, name: str, unit: UnitBytes, piece: "_Piece") -> None:
        for number, index, sending in piece.numbered():
            flat = unit.flats[number]
            if flat.in_place:
                self._free(Buffer.WHOLE_GRADS, name, index)
            if not self.chained:
                self._allocate(Buffer.SUM, name, index, sending.sum)
            if (Buffer.WORKSPACE, name, index) in self._held:
                self._free(Buffer.WORKSPACE, name, index)
            if not flat.in_place:
                self._free(Buffer.WHOLE_GRADS, name, index)

    def _settle(self, name: str, unit: UnitBytes, piece: "_Piece") -> None:
        for number, index, sending in piece.numbered():
            grads, is_new = unit.flats[number].grads, (Buffer.GRADS, name, number) not in self._held
            becomes = is_new and sending.sum == grads
            if becomes:
                self._free(Buffer.SUM, name, index)
            if is_new:
                self._allocate(Buffer.GRADS, name, number, grads)
            if not becomes:
                self._free(Buffer.SUM, name, index)

    def _allocate(self, buffer: Buffer, name: str, index: int, nbytes: int) -> None:
        self._held[buffer, name, index] = nbytes
        self.events.append(Event(K.ALLOCATE, name, nbytes, buffer))

    def _free(self, buffer: Buffer, name: str, index: int) -> None:
        nbytes = self._held.pop((buffer, name, index))
        self.events.append(Event(K.FREE, name, nbytes, buffer))
