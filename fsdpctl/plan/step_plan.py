"""A rank's part of a step: where its states are, what is gathered, and how gradients are added.

The engine allocates and runs what a `StepPlan` says, and estimates price it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto
from functools import cached_property
from statistics import median

from fsdpctl.errors import UsageError
from fsdpctl.plan.layout import FlatLayout, Span, aligned_chunk
from fsdpctl.plan.precision import BufferDtypes, Dtype, Precision
from fsdpctl.plan.strategy import Offload, Strategy
from fsdpctl.plan.units import ModelLayout, UnitOrder

SUM_CHUNK = 1 << 17  # elements, scaled while they are in the cache
HOST_BUFFERS = 2  # pinned ones for each direction
HOST_SCALARS = 8  # bytes
_OVERSIZE = 2  # a unit above this multiple of the median would enlarge a shared slot


class Transport(StrEnum):
    """A communication backend."""

    GLOO = "gloo"
    NCCL = "nccl"
    SHARED = "shared"  # memory of one machine


@dataclass(frozen=True, slots=True)
class MeshPosition:
    """The position of a rank."""

    rank: int  # among those that share a replica
    size: int  # the number of those
    num_replicas: int
    transport: Transport
    replica: int = 0  # the one that it belongs to

    def local_share(self, nbytes: int) -> int:
        """Return this rank's share of memory that exists once for all ranks, else all of it."""
        return -(-nbytes // self.size) if self.transport is Transport.SHARED else nbytes


@dataclass(frozen=True, slots=True)
class Prefetch:
    """The number of units gathered ahead of the running one, in forward and in backward."""

    forward: int = 1
    backward: int = 1

    @property
    def depth(self) -> int:
        return max(self.forward, self.backward)


@dataclass(frozen=True, slots=True)
class UnshardBufferSpec:
    """One slot: its size and the units that use it."""

    nbytes: int
    units: tuple[str, ...]
    is_permanent: bool  # always allocated; otherwise only while its unit is unsharded


def assign_unshard_buffers(
    nbytes: Mapping[str, int], root: str, forward: Sequence[str], depth: int
) -> tuple[UnshardBufferSpec, ...]:
    """Assign slots to units of the given sizes, of which `depth + 1` are unsharded at a time."""
    limit = _OVERSIZE * median([nbytes[unit] for unit in forward]) if forward else 0
    alone = [unit for unit in forward if nbytes[unit] > limit]
    shared = [unit for unit in forward if nbytes[unit] <= limit]
    own = [UnshardBufferSpec(nbytes[unit], (unit,), is_permanent=False) for unit in (root, *alone)]
    count = min(depth + 1, len(shared))
    members = [tuple(shared[index::count]) for index in range(count)]
    common = [
        UnshardBufferSpec(max(nbytes[u] for u in units), units, is_permanent=True)
        for units in members
    ]
    return (*own, *common)


@dataclass(frozen=True, slots=True)
class Reductions:
    """The plan of all gradient reductions."""

    nbytes: Mapping[str, int]  # of every unit's gradients, in the reduced dtype
    budget: int  # bytes that may be in flight before a reduction is waited for
    accumulates_in_place: bool = False  # whether a first sum stays in the buffer of its reduction
    # For units larger than every block: the number of pieces in which the gradients of one backward
    # are collected and reduced. Held gradients are collected already.
    pieces: Mapping[str, int] = field(default_factory=dict)
    # The number of ranks among which a sum is split, if its sum over replicas follows at once; 0:
    # if that follows once the reduction has been waited for.
    chained: int = 0
    combines: bool = False  # whether a second collective follows each reduction

    @property
    def most_in_flight(self) -> int:
        """The bytes of the reductions that may be in flight at once."""
        return max(self.budget, *self.nbytes.values())

    def fits(self, nbytes: int, others: Iterable[int], *, is_first: bool = False) -> bool:
        """Return whether a reduction may be in flight together with `others`, all in bytes.

        `is_first`: no earlier gradient exists to add to, so a sum that stays costs nothing.
        """
        if self.accumulates_in_place and is_first:
            return True
        sizes = list(others)
        return not sizes or sum(sizes, nbytes) <= self.budget


def piece_span(layout: FlatLayout, piece: int, pieces: int) -> Span:
    """Return the elements of each rank's part that piece `piece` reduces; may be empty."""
    return aligned_chunk(Span(0, layout.owned_spans[0].numel), piece, pieces)


def _num_pieces(layouts: Sequence[FlatLayout], asked: int) -> int:
    """Return how many of `asked` pieces are not empty."""
    pieces = range(asked)
    return max(sum(piece_span(x, i, asked).numel > 0 for i in pieces) for x in layouts)


class StorageLocation(Enum):
    """The place of what rests between steps."""

    DEVICE = auto()
    HOST = auto()
    UNSHARD_BUFFER = auto()  # of a unit that stays unsharded
    PARAMS = auto()  # of masters: a window of the parameters that rest
    MASTERS = auto()  # of parameters: they are the masters


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """A rank's part of a flat buffer between steps."""

    master_span: Span  # the elements whose masters it has
    master_location: StorageLocation
    param_span: Span  # the elements whose parameters it has in the compute dtype
    param_location: StorageLocation
    dtypes: BufferDtypes

    @property
    def is_gathered_from_host(self) -> bool:
        """Whether parameters rest in host memory."""
        return (
            self.master_location
            if self.param_location is StorageLocation.MASTERS
            else self.param_location
        ) is StorageLocation.HOST

    @property
    def remainder_bytes(self) -> int:
        return self.master_span.numel * self.dtypes.has_remainder


@dataclass(frozen=True, slots=True)
class HostMemory:
    """A rank's model states and pinned buffers in host memory, without optimizer states."""

    masters: Mapping[Dtype, int]  # elements by dtype
    pinned: frozenset[Dtype]  # of masters that go to the device as they are
    gradients: Mapping[Dtype, Dtype]  # by the dtype of their masters, if the host keeps them
    remainders: int  # bytes
    scalars: int
    gradient_buffers: int  # bytes of each
    cast_buffers: int
    params: tuple[tuple[int, Dtype], ...]  # elements of each part

    @property
    def nbytes(self) -> int:
        masters = sum(numel * dtype.itemsize for dtype, numel in self.masters.items())
        kept = sum(self.masters[of] * dtype.itemsize for of, dtype in self.gradients.items())
        params = sum(numel * dtype.itemsize for numel, dtype in self.params)
        buffers = HOST_BUFFERS * (self.gradient_buffers + self.cast_buffers) + self.scalars
        return masters + self.remainders + kept + buffers + params


@dataclass(frozen=True)
class StepPlan:
    """All that determines what a rank of fsdpctl's engine allocates, gathers and reduces."""

    model_layout: ModelLayout
    position: MeshPosition
    precision: Precision = Precision()
    prefetch: Prefetch = Prefetch()
    offload: Offload = Offload.NONE

    def at(self, rank: int, replica: int = 0) -> "StepPlan":
        """Return the plan of another rank."""
        return replace(self, position=replace(self.position, rank=rank, replica=replica))

    @cached_property
    def order(self) -> UnitOrder:
        return self.model_layout.order

    @property
    def layouts(self) -> Mapping[str, tuple[FlatLayout, ...]]:
        return self.model_layout.layouts

    @property
    def strategy(self) -> Strategy:
        return self.model_layout.strategy

    @cached_property
    def trained(self) -> Mapping[str, tuple[FlatLayout, ...]]:
        """The flat buffers whose parameters are trained, of every unit."""
        return {name: tuple(x for x in xs if x.trainable) for name, xs in self.layouts.items()}

    def check_offload(self) -> None:
        """Check that these states can be in host memory; UsageError says why not."""
        ranks = self.position.size * self.position.num_replicas
        if refusal := self.offload.conflict(self.strategy, self.strategy, ranks):
            raise UsageError(f"strategy.offload={self.offload}: {refusal}")
        self.offload.check_frozen_params(trains_all=self.trained == self.layouts)

    def all_trained(self) -> Iterator[FlatLayout]:
        return (each for of_unit in self.trained.values() for each in of_unit)

    def dtypes_of(self, layout: FlatLayout) -> BufferDtypes:
        return self.precision.buffer_dtypes(
            layout.param_spans[0].param.dtype, trainable=layout.trainable
        )

    @cached_property
    def typical_dtypes(self) -> BufferDtypes:
        """The dtypes of the first trained flat buffer, which most have."""
        return next(
            map(self.dtypes_of, self.all_trained()), self.precision.buffer_dtypes("float32")
        )

    # ---- at rest -------------------------------------------------------------------------

    @property
    def steps_on_host(self) -> bool:
        return Offload.STATES in self.offload

    @property
    def fetches_gradients(self) -> bool:
        """Whether the host fetches gradients for its step, which stay on the device until then."""
        return self.steps_on_host and Offload.GRADIENTS not in self.offload

    def master_span(self, layout: FlatLayout) -> Span:
        """Return the elements of a flat buffer whose master weights this rank has."""
        if not self.strategy.shards_optimizer:
            return Span(0, layout.numel)
        return layout.owned_span(self.position.rank, self.position.replica)

    def placement(self, layout: FlatLayout) -> ShardPlacement:
        dtypes, held = self.dtypes_of(layout), self.master_span(layout)
        part, is_one = layout.shard_spans[self.position.rank], dtypes.compute == dtypes.master
        is_stepped = self.steps_on_host and layout.trainable
        on_host = Offload.PARAMS in self.offload
        if not self.strategy.shards_params:
            part, part_in = Span(0, layout.numel), StorageLocation.UNSHARD_BUFFER
        elif (layout.shares_per_shard == 1 and not is_stepped) or (on_host and is_one):
            part_in = StorageLocation.MASTERS
        else:
            part_in = StorageLocation.HOST if on_host else StorageLocation.DEVICE
        masters_in = StorageLocation.DEVICE
        if is_stepped or (on_host and not layout.trainable):
            masters_in = StorageLocation.HOST
        elif part_in is not StorageLocation.MASTERS and is_one:
            masters_in = StorageLocation.PARAMS
        return ShardPlacement(held, masters_in, part, part_in, dtypes)

    @cached_property
    def host_memory(self) -> HostMemory:
        """The memory of the host that this rank uses."""
        masters: dict[Dtype, int] = {}
        gradients: dict[Dtype, Dtype] = {}
        pinned: set[Dtype] = set()
        params: list[tuple[int, Dtype]] = []
        remainders = largest = largest_cast = 0
        for layout in (each for of_unit in self.layouts.values() for each in of_unit):
            rest = self.placement(layout)
            dtypes, numel = rest.dtypes, rest.master_span.numel
            if rest.param_location is StorageLocation.HOST:
                params.append((rest.param_span.numel, dtypes.compute))
            if rest.master_location is not StorageLocation.HOST:
                continue
            if not layout.trainable:
                params.append((numel, dtypes.compute))
                continue
            masters[dtypes.master] = masters.get(dtypes.master, 0) + numel
            remainders += rest.remainder_bytes
            if self.fetches_gradients:
                largest = max(largest, numel * dtypes.gradient.itemsize)
            else:
                gradients[dtypes.master] = dtypes.gradient
            if dtypes.compute == dtypes.master:
                pinned.add(dtypes.master)
            elif Offload.PARAMS not in self.offload:
                largest_cast = max(largest_cast, numel * dtypes.compute.itemsize)
        scalars = HOST_SCALARS * self.steps_on_host
        buffers = (largest, largest_cast)
        return HostMemory(
            masters, frozenset(pinned), gradients, remainders, scalars, *buffers, tuple(params)
        )

    # ---- gathers and reductions ----------------------------------------------------------

    @cached_property
    def unshard_buffers(self) -> tuple[UnshardBufferSpec, ...]:
        """The slots that units are gathered into; shared only if they are freed after forward."""
        nbytes = {
            name: sum(each.numel * self.dtypes_of(each).compute.itemsize for each in of_unit)
            for name, of_unit in self.layouts.items()
        }
        root, *forward = nbytes
        if self.strategy.reshard_after_forward:
            return assign_unshard_buffers(nbytes, root, forward, self.prefetch.depth)
        return tuple(
            UnshardBufferSpec(nbytes[name], (name,), is_permanent=False)
            for name in (root, *forward)
        )

    @property
    def uses_all_reduce(self) -> bool:
        """Whether one all-reduce gives every rank the full sum.

        Over gloo, the parts are added in rank order, as everywhere else, and then gathered.
        """
        keeps = self.position.size > 1 and not self.strategy.shards_grads
        return keeps and self.position.transport is Transport.NCCL

    @property
    def combines(self) -> bool:
        """Whether a second collective follows each reduction."""
        puts_together = not self.strategy.shards_grads and not self.uses_all_reduce
        return self.position.num_replicas > 1 or (self.position.size > 1 and puts_together)

    def reduces_in_place(self, layout: FlatLayout) -> bool:
        """Return whether the buffer of a reduction becomes the gradient, if there is none yet."""
        dtypes = self.dtypes_of(layout)
        keeps_all = self.position.size == 1 or not self.strategy.shards_grads
        return keeps_all and dtypes.reduce == dtypes.gradient

    @cached_property
    def reductions(self) -> Reductions:
        """The reductions: in flight are the bytes of the largest unit, or twice that in 2 bytes.

        Two reductions of 2 bytes per element cost as much as one of 4. The order of collectives
        follows from this, so it depends on nothing that differs between ranks. If parameters are
        sharded, the largest block sets the budget, and larger units, usually embedding and head,
        are reduced in pieces of its size.
        """
        place, strategy = self.position, self.strategy
        trained = [self.dtypes_of(each) for each in self.all_trained()]
        nbytes = {
            name: sum(layout.numel * self.dtypes_of(layout).reduce.itemsize for layout in of_unit)
            for name, of_unit in self.trained.items()
        }
        widest = max((each.reduce.itemsize for each in trained), default=4)
        blocks = self.order.blocks if strategy.shards_params and place.size > 1 else ()
        largest = max((nbytes[name] for name in blocks), default=0) or max(nbytes.values())
        counts = {name: -(-size // largest) for name, size in nbytes.items() if size > largest}
        pieces = {name: _num_pieces(self.trained[name], count) for name, count in counts.items()}
        budget = largest * (1 if widest > 2 else 2)
        same = all(each.reduce == each.gradient for each in trained)
        # Over NCCL, replicas are summed on streams of their own.
        follows = strategy.replicates and place.num_replicas > 1
        chained = place.size if follows and place.transport is Transport.NCCL else 0
        return Reductions(
            nbytes, budget, self.uses_all_reduce and same, pieces, chained, self.combines
        )

    @property
    def outbox_bytes(self) -> int:
        """The bytes of this rank's gradients in shared memory, where other ranks read them."""
        shares = self.position.transport is Transport.SHARED
        return self.reductions.most_in_flight if shares else 0

    @property
    def shared_bytes(self) -> int:
        """The bytes that all ranks share: parameters, and gradients to be read."""
        if self.position.transport is not Transport.SHARED:
            return 0
        return (
            sum(slot.nbytes for slot in self.unshard_buffers)
            + self.position.size * self.outbox_bytes
        )
