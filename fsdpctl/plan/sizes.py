"""The sizes of each unit's buffers on a rank, in bytes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from fsdpctl.plan.layout import EvenParts, FlatLayout
from fsdpctl.plan.reductions import (
    Itemsize,
    Reductions,
    Transport,
    reduce_workspace,
    share_of_parts,
)
from fsdpctl.plan.strategy import Strategy
from fsdpctl.plan.transfers import Transfers

_OVERSIZE = 2  # a unit above this multiple of the median would enlarge a shared slot


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """One slot: its size and the units that use it."""

    nbytes: int
    units: tuple[str, ...]
    resident: bool  # always allocated; otherwise only while its unit is unsharded


def assign_slots(
    nbytes: Mapping[str, int], root: str, forward: Sequence[str], depth: int
) -> tuple[SlotSpec, ...]:
    """Assign slots to units of the given sizes, of which `depth + 1` are unsharded at a time."""
    limit = _OVERSIZE * median([nbytes[unit] for unit in forward]) if forward else 0
    alone = [unit for unit in forward if nbytes[unit] > limit]
    shared = [unit for unit in forward if nbytes[unit] <= limit]
    own = [SlotSpec(nbytes[unit], (unit,), resident=False) for unit in (root, *alone)]
    count = min(depth + 1, len(shared))
    members = [tuple(shared[index::count]) for index in range(count)]
    common = [SlotSpec(max(nbytes[u] for u in units), units, resident=True) for units in members]
    return (*own, *common)


def slots_of(
    strategy: Strategy,
    layouts: Mapping[str, Sequence[FlatLayout]],
    itemsize: Itemsize,
    depth: int,
) -> tuple[SlotSpec, ...]:
    """Return the slots under a strategy; they are shared only if it reshards after forward."""
    nbytes = {name: sum(each.numel * itemsize(each) for each in of) for name, of in layouts.items()}
    root, *forward = nbytes
    if strategy.reshard_after_forward:
        return assign_slots(nbytes, root, forward, depth)
    return tuple(SlotSpec(nbytes[name], (name,), resident=False) for name in (root, *forward))


HOST_BUFFERS = 2  # pinned ones for each direction
HOST_SCALARS = 8  # bytes


def pinned_groups(count: int, nbytes: int) -> Iterator[int]:
    """Yield how many of `count` pieces of pinned memory, `nbytes` each, to allocate together.

    Torch rounds pinned memory up to a power of two: the number that fills most of it.
    """

    def filled(together: int) -> float:
        return together * nbytes / (1 << (together * nbytes - 1).bit_length())

    while count and nbytes:
        together = max(range(1, count + 1), key=lambda number: (filled(number), number))
        yield together
        count -= together


DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Itemsizes:
    """Bytes per element."""

    param: int  # gathered, to compute with
    reduce: int  # gradients while they are added over ranks
    master: int  # what the optimizer updates, and its states unless they have another dtype
    remainder: int = 0  # the lower bits of masters of 24 bits, of which `master` is the upper half

    @property
    def grad(self) -> int:
        """The bytes of a reduced gradient."""
        return self.reduce if self.remainder else self.master

    def drawn(self, layout: FlatLayout) -> int:
        """Return the bytes in which an initial value is drawn."""
        return 4 if self.remainder and layout.trainable else self.kept(layout)

    def gathered(self, layout: FlatLayout) -> int:
        """Return the bytes of what is gathered of a flat buffer."""
        return 1 if layout.is_bytes else self.param

    def kept(self, layout: FlatLayout) -> int:
        """Return the bytes of what a flat buffer keeps: master weights, or frozen parameters."""
        return self.master if layout.trainable else self.gathered(layout)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The position of a rank."""

    rank: int  # among those that share a replica
    size: int  # the number of those
    num_replicas: int
    transport: Transport
    copy: int = 0  # the replica that it belongs to

    def share_of(self, nbytes: int) -> int:
        """Return this rank's share of memory that exists once for all ranks, else all of it."""
        return -(-nbytes // self.size) if self.transport is Transport.SHARED else nbytes

    def transfers(self, strategy: Strategy) -> Transfers:
        """Return how the ranks reduce gradients."""
        return Transfers(strategy, self.transport, self.size, self.num_replicas)


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


def _flat_bytes(
    layout: FlatLayout, pieces: int, strategy: Strategy, sizes: Itemsizes, place: RankPlace
) -> FlatBytes:
    transfers = place.transfers(strategy)
    kept = layout.parts[place.rank].numel if strategy.shards_grads else layout.numel
    workspace = reduce_workspace(place.transport, layout.parts, place.rank) * sizes.reduce
    total, whole = kept * sizes.grad, layout.numel * sizes.reduce
    combining, becomes = _combining(layout, kept, sizes, place), layout.shares == 1
    held = Sending(whole, 0 if transfers.adds_whole else workspace, total, combining, becomes)
    fresh: tuple[Sending, ...] = (held,)
    if pieces > 1:
        shares = [share_of_parts(layout, piece, pieces).numel for piece in range(pieces)]
        fresh = tuple(_collected(layout, share, sizes, place) for share in shares)
    in_place = transfers.becomes_gradient(same_dtype=sizes.reduce == sizes.grad)
    return FlatBytes(fresh, held, total // layout.shares, in_place)


def _collected(layout: FlatLayout, share: int, sizes: Itemsizes, place: RankPlace) -> Sending:
    """Return the memory of one of several pieces, of which every rank owns `share` elements."""
    own = share * layout.shares
    parts = EvenParts(own, place.size)
    workspace = reduce_workspace(place.transport, parts, place.rank) * sizes.reduce
    combining = _combining(layout, own, sizes, place)
    whole = own * place.size * sizes.reduce
    return Sending(whole, workspace, own * sizes.grad, combining, becomes=False)


def _combining(layout: FlatLayout, numel: int, sizes: Itemsizes, place: RankPlace) -> int:
    """Return the bytes of workspace to divide a sum of `numel` elements over the replicas."""
    if layout.shares == 1:
        return 0
    shares = EvenParts(numel // layout.shares, layout.shares)
    return reduce_workspace(place.transport, shares, place.copy) * sizes.grad


def unit_bytes(
    layouts: Mapping[str, Sequence[FlatLayout]],
    slots: Iterable[SlotSpec],
    strategy: Strategy,
    sizes: Itemsizes,
    place: RankPlace,
    reductions: Reductions,
) -> dict[str, UnitBytes]:
    """Return the sizes of every unit on one rank."""

    return {
        name: UnitBytes(
            sum(layout.numel * sizes.gathered(layout) for layout in layouts[name]),
            slot.nbytes,
            slot.resident or not strategy.shards_params,
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
