"""What the buffers of each unit take on a rank, in bytes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdpctl.plan.layout import EvenParts, FlatLayout
from fsdpctl.plan.reductions import Reductions, share_of_parts
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

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Itemsizes:
    """Bytes of one element."""

    param: int  # gathered, and computed with
    reduce: int  # gradients while they are added over ranks
    master: int  # what the optimizer updates, its states, and reduced gradients
    wire: int | None = None  # gradients of one backward on their way; None: what the transport does

    def kept(self, layout: FlatLayout) -> int:
        """Of what stays of a flat buffer: masters, or of what is frozen what computes."""
        return self.master if layout.trainable else self.param


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
    copy: int = 0  # the copy that it belongs to

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
    combining: int = 0  # workspace of the second collective
    becomes: bool = True  # the sum can be the gradient, where there is none yet


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
    renewed: int  # of what ranks bring up to date after a step
    flats: tuple[FlatBytes, ...]


def _flat_bytes(
    layout: FlatLayout, pieces: int, strategy: Strategy, sizes: Itemsizes, place: RankPlace
) -> FlatBytes:
    kept = layout.parts[place.rank].numel if strategy.shards_grads else layout.numel
    workspace = reduce_workspace(place.transport, layout.parts, place.rank)
    if not strategy.shards_grads and adds_whole(place.transport, place.size):
        workspace = 0
    total = kept * sizes.master
    about = total, _combining(layout, kept, sizes, place), layout.shares == 1
    held = Sending(layout.numel * sizes.reduce, workspace * sizes.reduce, *about)
    fresh: tuple[Sending, ...] = (held,)
    itemsize = wire_itemsize(layout, strategy, sizes, place.transport)
    if strategy.shards_grads and sends_in_place(place.transport, layout.parts):
        sent = sum(span.numel for span, _ in gradient_stretches(layout))
        fresh = (Sending(sent * itemsize, workspace * itemsize, *about),)
    elif place.collects(strategy):
        shares = [share_of_parts(layout, piece, pieces).numel for piece in range(pieces)]
        fresh = tuple(_collected(layout, share, itemsize, sizes, place) for share in shares)
        if pieces > 1:
            fresh = tuple(replace(each, becomes=False) for each in fresh)
    keeps = place.size == 1 or not strategy.shards_grads
    in_place = keeps and sizes.reduce == sizes.master
    return FlatBytes(fresh, held, total // layout.shares, in_place)


def _collected(
    layout: FlatLayout, share: int, itemsize: int, sizes: Itemsizes, place: RankPlace
) -> Sending:
    """Of what every rank owns `share` elements."""
    own = share * layout.shares
    whole = own * place.size * itemsize
    workspace = own * itemsize if place.transport is Transport.GLOO else 0
    if exchanges(place.transport, itemsize, sizes.reduce):
        workspace = whole
    combining = _combining(layout, own, sizes, place)
    return Sending(whole, workspace, own * sizes.master, combining, layout.shares == 1)


def _combining(layout: FlatLayout, numel: int, sizes: Itemsizes, place: RankPlace) -> int:
    """Bytes that it takes to divide a sum of `numel` elements over the copies."""
    if layout.shares == 1:
        return 0
    shares = EvenParts(numel // layout.shares, layout.shares)
    return reduce_workspace(place.transport, shares, place.copy) * sizes.master


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
            sum(
                layout.numel if layout.shares == 1 else layout.parts[0].numel
                for layout in layouts[name]
                if layout.trainable
            )
            * sizes.param,
            tuple(
                _flat_bytes(each, reductions.pieces.get(name, 1), strategy, sizes, place)
                for each in layouts[name]
                if each.trainable
            ),
        )
        for slot in slots
        for name in slot.units
    }
