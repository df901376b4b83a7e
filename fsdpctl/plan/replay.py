"""Events with their bytes: what each collective sends, and which buffers come and go with it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fsdpctl.plan.layout import FlatLayout
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

    def stays(self, strategy: Strategy, sizes: Itemsizes) -> bool:
        """Whether a sum stays in the buffer that it was added in, without more memory."""
        adds = self.size > 1 and adds_whole(self.transport, self.size)
        return adds and not strategy.shards_grads and sizes.reduce == sizes.master


@dataclass(frozen=True, slots=True)
class Sending:
    """What a reduction holds on this rank, in bytes."""

    whole_grads: int  # to be sent
    workspace: int


@dataclass(frozen=True, slots=True)
class FlatBytes:
    """One trained flat buffer of a unit, in bytes."""

    fresh: Sending  # gradients of one backward
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


def unit_bytes(
    layouts: Mapping[str, Sequence[FlatLayout]],
    slots: Iterable[SlotSpec],
    strategy: Strategy,
    sizes: Itemsizes,
    place: RankPlace,
) -> dict[str, UnitBytes]:
    """Every unit as one rank sees it."""

    def flat(layout: FlatLayout) -> FlatBytes:
        kept = layout.parts[place.rank].numel if strategy.shards_grads else layout.numel
        workspace = reduce_workspace(place.transport, layout.parts, place.rank)
        if not strategy.shards_grads and adds_whole(place.transport, place.size):
            workspace = 0
        held = fresh = Sending(layout.numel * sizes.reduce, workspace * sizes.reduce)
        if strategy.shards_grads:
            itemsize = wire_itemsize(layout, strategy, sizes, place.transport)
            if sends_in_place(place.transport, layout.parts):
                sent = sum(span.numel for span, _ in gradient_stretches(layout))
                fresh = Sending(sent * itemsize, workspace * itemsize)
            elif exchanges(place.transport, itemsize, sizes.reduce):
                fresh = Sending(layout.numel * itemsize, layout.numel * itemsize)
        keeps = place.size == 1 or not strategy.shards_grads
        in_place = keeps and sizes.reduce == sizes.master
        return FlatBytes(fresh, held, kept * sizes.master, in_place)

    return {
        name: UnitBytes(
            sum(layout.numel for layout in layouts[name]) * sizes.param,
            slot.nbytes,
            slot.resident or strategy.keeps_whole_params,
            tuple(flat(each) for each in layouts[name] if each.params[0].trainable),
        )
        for slot in slots
        for name in slot.units
    }


class Replay:
    """Writes planned events down again with everything that has bytes."""

    def __init__(self, units: Mapping[str, UnitBytes], *, combines: bool) -> None:
        self.units = units
        self.combines = combines
        self.events: list[Event] = []
        self._held: dict[tuple[Buffer, str, int], int] = {}

    def play(self, events: Iterable[Event]) -> list[Event]:
        """`events` with bytes, and what they allocate and free."""
        for event in events:
            self._play(event.kind, event.unit, self.units[event.unit])
        return self.events

    def _play(self, kind: EventKind, name: str, unit: UnitBytes) -> None:
        indices = range(len(unit.flats))
        if kind is K.GATHER and not unit.resident:
            self._allocate(Buffer.PARAMS, name, 0, unit.slot)
        if kind in (K.HOLD, K.REDUCE):
            for index in indices:
                self._start(name, index, unit.flats[index], reduces=kind is K.REDUCE)
        if kind is K.REDUCED:
            for index in indices:
                self._finish(name, index, unit.flats[index])
        if kind is K.COMBINED or (kind is K.REDUCED and not self.combines):
            for index in indices:
                self._settle(name, index, unit.flats[index])
        self.events.append(Event(kind, name, self._sent(kind, name, unit)))
        if kind is K.RELEASE and not unit.resident:
            self._free(Buffer.PARAMS, name, 0)

    def _start(self, name: str, index: int, flat: FlatBytes, *, reduces: bool) -> None:
        was_held = (Buffer.WHOLE_GRADS, name, index) in self._held
        sending = flat.fresh if reduces and not was_held else flat.held
        if not was_held:
            self._allocate(Buffer.WHOLE_GRADS, name, index, sending.whole_grads)
        if reduces and sending.workspace:
            self._allocate(Buffer.WORKSPACE, name, index, sending.workspace)

    def _finish(self, name: str, index: int, flat: FlatBytes) -> None:
        if flat.in_place:
            self._free(Buffer.WHOLE_GRADS, name, index)
        self._allocate(Buffer.SUM, name, index, flat.grads)
        if (Buffer.WORKSPACE, name, index) in self._held:
            self._free(Buffer.WORKSPACE, name, index)
        if not flat.in_place:
            self._free(Buffer.WHOLE_GRADS, name, index)

    def _settle(self, name: str, index: int, flat: FlatBytes) -> None:
        self._free(Buffer.SUM, name, index)
        if (Buffer.GRADS, name, index) not in self._held:
            self._allocate(Buffer.GRADS, name, index, flat.grads)

    def _sent(self, kind: EventKind, name: str, unit: UnitBytes) -> int:
        if kind in (K.GATHER, K.SYNC):
            return unit.params
        if kind is K.REDUCE:
            return sum(
                self._held[Buffer.WHOLE_GRADS, name, index] for index in range(len(unit.flats))
            )
        return sum(flat.grads for flat in unit.flats) if kind is K.COMBINE else 0

    def _allocate(self, buffer: Buffer, name: str, index: int, nbytes: int) -> None:
        self._held[buffer, name, index] = nbytes
        self.events.append(Event(K.ALLOCATE, name, nbytes, buffer))

    def _free(self, buffer: Buffer, name: str, index: int) -> None:
        nbytes = self._held.pop((buffer, name, index))
        self.events.append(Event(K.FREE, name, nbytes, buffer))
