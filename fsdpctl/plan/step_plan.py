"""The step of one rank: where its states are stored, what it gathers, how gradients are reduced.

The engine allocates and runs what a `StepPlan` defines. Estimates replay the same plan.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto
from functools import cached_property
from statistics import median

from fsdpctl.errors import UsageError
from fsdpctl.plan.layout import FlatLayout, Span, aligned_chunk
from fsdpctl.plan.precision import BufferDtypes, Dtype, Precision
from fsdpctl.plan.strategy import Offload, Strategy
from fsdpctl.plan.units import ModelLayout, UnitOrder

SUM_CHUNK = 1 << 17  # elements that a rank adds at a time: they stay in the cache
HOST_BUFFERS = 2  # pinned buffers for each direction
HOST_SCALARS = 8  # bytes of the two float32 scalars of a step on the host
_OVERSIZE = 2  # units above this multiple of the median size have separate unshard buffers


class Transport(StrEnum):
    """A communication backend."""

    GLOO = "gloo"
    NCCL = "nccl"
    SHARED = "shared"  # memory of one machine


@dataclass(frozen=True, slots=True)
class MeshPosition:
    """The coordinates of a rank in the mesh of shards and replicas."""

    rank: int  # within its replica
    num_shards: int  # ranks per replica
    num_replicas: int
    transport: Transport
    replica: int = 0  # index of the rank's replica

    def local_share(self, nbytes: int) -> int:
        """Return the bytes to count for this rank: an equal share if all ranks share the memory."""
        return -(-nbytes // self.num_shards) if self.transport is Transport.SHARED else nbytes


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
    """The size of an unshard buffer, and the units that are gathered into it."""

    nbytes: int
    units: tuple[str, ...]
    is_permanent: bool  # always allocated; otherwise only while a unit is unsharded


def assign_unshard_buffers(
    nbytes: Mapping[str, int], root: str, forward: Sequence[str], depth: int
) -> tuple[UnshardBufferSpec, ...]:
    """Assign unshard buffers to units by their size in bytes.

    At most `depth + 1` of the units that share permanent buffers are unsharded at a time. The root
    and oversized units have separate buffers, so that they do not enlarge the shared buffers.
    """
    limit = _OVERSIZE * median([nbytes[unit] for unit in forward]) if forward else 0
    oversized = [unit for unit in forward if nbytes[unit] > limit]
    shared = [unit for unit in forward if nbytes[unit] <= limit]
    separate = [UnshardBufferSpec(nbytes[x], (x,), is_permanent=False) for x in (root, *oversized)]
    count = min(depth + 1, len(shared))
    members = [tuple(shared[index::count]) for index in range(count)]
    sizes = [max(nbytes[unit] for unit in units) for units in members]
    pairs = zip(sizes, members, strict=True)
    shared_buffers = [UnshardBufferSpec(size, units, is_permanent=True) for size, units in pairs]
    return (*separate, *shared_buffers)


@dataclass(frozen=True, slots=True)
class Reductions:
    """The plan of all gradient reductions."""

    nbytes: Mapping[str, int]  # each unit's gradients, in the dtype of the reduction
    budget: int  # bytes that may be in flight before a reduction is waited for
    # Whether the first sum is left in the reduction's buffer and accumulated there.
    accumulates_in_place: bool = False
    # For units larger than every block: the number of pieces in which the gradients of one backward
    # are collected and reduced. Held gradients are already in one buffer and are not cut.
    pieces: Mapping[str, int] = field(default_factory=dict)
    # Ranks per replica, if the sum over replicas is enqueued right behind each reduction; 0 if it
    # starts once the reduction has been waited for.
    chained_ranks: int = 0
    combines: bool = False  # whether a second collective follows each reduction

    @property
    def most_in_flight_bytes(self) -> int:
        """The bytes of the reductions that may be in flight at once."""
        return max(self.budget, *self.nbytes.values())

    def fits(self, nbytes: int, in_flight: Sequence[int], *, is_first: bool = False) -> bool:
        """Return whether a reduction may start while others are `in_flight`, all in bytes.

        `is_first`: there is no earlier gradient to add to, so a sum in place needs no more memory.
        """
        if (self.accumulates_in_place and is_first) or not in_flight:
            return True
        return nbytes + sum(in_flight) <= self.budget


def piece_span(layout: FlatLayout, piece: int, pieces: int) -> Span:
    """Return piece `piece` of each rank's owned span, relative to its start; may be empty."""
    return aligned_chunk(Span(0, layout.owned_spans[0].numel), piece, pieces)


def _num_pieces(layouts: Sequence[FlatLayout], count: int) -> int:
    """Return how many of `count` pieces are not empty."""
    pieces = range(count)
    return max(sum(piece_span(x, i, count).numel > 0 for i in pieces) for x in layouts)


class StorageLocation(Enum):
    """The memory in which masters or parameters are stored between steps."""

    DEVICE = auto()
    HOST = auto()
    UNSHARD_BUFFER = auto()  # parameters of a unit that stays unsharded
    PARAMS = auto()  # master weights that are a view of the stored parameters
    MASTERS = auto()  # parameters that are the master weights themselves


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """The elements of a flat buffer that a rank stores between steps, and their memory."""

    master_span: Span  # elements whose master weights the rank stores
    master_location: StorageLocation
    param_span: Span  # elements whose parameters the rank stores in the compute dtype
    param_location: StorageLocation
    dtypes: BufferDtypes

    @property
    def is_gathered_from_host(self) -> bool:
        """Whether parameters are stored in host memory, from which they are gathered."""
        are_masters = self.param_location is StorageLocation.MASTERS
        location = self.master_location if are_masters else self.param_location
        return location is StorageLocation.HOST

    @property
    def remainder_bytes(self) -> int:
        return self.master_span.numel * self.dtypes.has_remainders  # 1 byte each


@dataclass(frozen=True, slots=True)
class HostMemory:
    """A rank's model states and pinned buffers in host memory, without optimizer states."""

    masters: Mapping[Dtype, int]  # elements by dtype
    pinned: frozenset[Dtype]  # dtypes of masters that are copied to the device without a cast
    gradients: Mapping[Dtype, Dtype]  # dtype by dtype of masters; empty: gradients on the device
    remainders: int  # bytes
    scalars: int  # bytes
    gradient_buffers: int  # bytes of each buffer
    cast_buffers: int  # bytes of each buffer
    params: tuple[tuple[int, Dtype], ...]  # elements and dtype of each stored shard

    @property
    def nbytes(self) -> int:
        masters = sum(numel * dtype.itemsize for dtype, numel in self.masters.items())
        gradients = sum(self.masters[of] * dtype.itemsize for of, dtype in self.gradients.items())
        params = sum(numel * dtype.itemsize for numel, dtype in self.params)
        buffers = HOST_BUFFERS * (self.gradient_buffers + self.cast_buffers) + self.scalars
        return masters + self.remainders + gradients + buffers + params


@dataclass(frozen=True)
class StepPlan:
    """The plan of what a rank of fsdpctl's engine allocates, gathers and reduces."""

    model_layout: ModelLayout
    position: MeshPosition
    precision: Precision = Precision()
    prefetch: Prefetch = Prefetch()
    offload: Offload = Offload.NONE

    def at(self, rank: int, replica: int = 0) -> "StepPlan":
        """Return the plan of rank `rank` of a replica."""
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
        """The flat buffers of trained parameters, by unit."""
        return {name: tuple(x for x in xs if x.trainable) for name, xs in self.layouts.items()}

    def check_offload(self) -> None:
        """Check that the states of `offload` can be in host memory; UsageError gives the reason."""
        ranks = self.position.num_shards * self.position.num_replicas
        # The plan has only the effective strategy.
        if conflict := self.offload.conflict(self.strategy, self.strategy, ranks):
            raise UsageError(f"strategy.offload={self.offload}: {conflict}")
        self.offload.check_frozen_params(trains_all=self.trained == self.layouts)

    def all_layouts(self) -> Iterator[FlatLayout]:
        return (each for of_unit in self.layouts.values() for each in of_unit)

    def all_trained(self) -> Iterator[FlatLayout]:
        return (each for each in self.all_layouts() if each.trainable)

    def dtypes_of(self, layout: FlatLayout) -> BufferDtypes:
        dtype = layout.param_spans[0].param.dtype
        return self.precision.buffer_dtypes(dtype, trainable=layout.trainable)

    @cached_property
    def typical_dtypes(self) -> BufferDtypes:
        """The dtypes of the first trained flat buffer; usually all buffers have them."""
        layouts = self.all_trained()
        return next(map(self.dtypes_of, layouts), self.precision.buffer_dtypes("float32"))

    # ---- between steps -------------------------------------------------------------------

    @property
    def steps_on_host(self) -> bool:
        return Offload.STATES in self.offload

    @property
    def fetches_gradients(self) -> bool:
        """Whether gradients stay on the device until the host copies them for its step."""
        return self.steps_on_host and Offload.GRADIENTS not in self.offload

    def master_span(self, layout: FlatLayout) -> Span:
        """Return the elements of a flat buffer whose master weights this rank stores."""
        if not self.strategy.shards_optimizer:
            return Span(0, layout.numel)
        return layout.owned_span(self.position.rank, self.position.replica)

    def placement(self, layout: FlatLayout) -> ShardPlacement:
        dtypes, master_span = self.dtypes_of(layout), self.master_span(layout)
        param_span = layout.shard_spans[self.position.rank]
        same_dtype = dtypes.compute == dtypes.master
        host_steps = self.steps_on_host and layout.trainable
        on_host = Offload.PARAMS in self.offload
        if not self.strategy.shards_params:
            param_span, param_location = Span(0, layout.numel), StorageLocation.UNSHARD_BUFFER
        # A shard in the memory and the dtype of its masters needs no copy.
        elif (layout.shares_per_shard == 1 and not host_steps) or (on_host and same_dtype):
            param_location = StorageLocation.MASTERS
        else:
            param_location = StorageLocation.HOST if on_host else StorageLocation.DEVICE
        master_location = StorageLocation.DEVICE
        if host_steps or (on_host and not layout.trainable):
            master_location = StorageLocation.HOST
        elif param_location is not StorageLocation.MASTERS and same_dtype:
            master_location = StorageLocation.PARAMS
        return ShardPlacement(master_span, master_location, param_span, param_location, dtypes)

    @cached_property
    def host_memory(self) -> HostMemory:
        """The host memory that this rank uses."""
        masters: dict[Dtype, int] = {}
        gradients: dict[Dtype, Dtype] = {}
        pinned: set[Dtype] = set()
        params: list[tuple[int, Dtype]] = []
        remainders = gradient_buffer = cast_buffer = 0
        for layout in self.all_layouts():
            placement = self.placement(layout)
            dtypes, numel = placement.dtypes, placement.master_span.numel
            if placement.param_location is StorageLocation.HOST:
                params.append((placement.param_span.numel, dtypes.compute))
            if placement.master_location is not StorageLocation.HOST:
                continue
            if not layout.trainable:
                params.append((numel, dtypes.compute))
                continue
            masters[dtypes.master] = masters.get(dtypes.master, 0) + numel
            remainders += placement.remainder_bytes
            if self.fetches_gradients:
                gradient_buffer = max(gradient_buffer, numel * dtypes.gradient.itemsize)
            else:
                gradients[dtypes.master] = dtypes.gradient
            if dtypes.compute == dtypes.master:
                pinned.add(dtypes.master)
            elif Offload.PARAMS not in self.offload:
                cast_buffer = max(cast_buffer, numel * dtypes.compute.itemsize)
        return HostMemory(
            masters, frozenset(pinned), gradients, remainders, HOST_SCALARS * self.steps_on_host,
            gradient_buffer, cast_buffer, tuple(params),
        )  # fmt: skip

    # ---- gathers and reductions ----------------------------------------------------------

    @cached_property
    def unshard_buffers(self) -> tuple[UnshardBufferSpec, ...]:
        """The unshard buffers of all units; shared only if units are freed after forward."""
        nbytes = {
            name: sum(each.numel * self.dtypes_of(each).compute.itemsize for each in of_unit)
            for name, of_unit in self.layouts.items()
        }
        root, *forward = nbytes
        if self.strategy.reshard_after_forward:
            return assign_unshard_buffers(nbytes, root, forward, self.prefetch.depth)
        return tuple(UnshardBufferSpec(nbytes[x], (x,), is_permanent=False) for x in nbytes)

    @property
    def uses_all_reduce(self) -> bool:
        """Whether one all-reduce gives every rank the full sum.

        Over gloo, each rank adds its shard in rank order, and the shards are then gathered: sums
        have the same bits under every strategy.
        """
        keeps_all = self.position.num_shards > 1 and not self.strategy.shards_grads
        return keeps_all and self.position.transport is Transport.NCCL

    @property
    def combines(self) -> bool:
        """Whether a second collective follows each reduction."""
        gathers_shards = not self.strategy.shards_grads and not self.uses_all_reduce
        return self.position.num_replicas > 1 or (self.position.num_shards > 1 and gathers_shards)

    def reduces_in_place(self, layout: FlatLayout) -> bool:
        """Return whether the buffer of the first reduction becomes the gradient itself."""
        dtypes = self.dtypes_of(layout)
        keeps_all = self.position.num_shards == 1 or not self.strategy.shards_grads
        return keeps_all and dtypes.reduce == dtypes.gradient

    @cached_property
    def reductions(self) -> Reductions:
        """The reductions, with a budget of the largest block, or unit if parameters are unsharded.

        In 2-byte dtypes, the budget is twice that: two reductions cost as much memory as one in 4
        bytes. Larger units, usually embedding and head, are reduced in pieces. The budget decides
        the order of collectives, so it must not differ between ranks: ranks with different orders
        would wait for each other forever.
        """
        position, strategy = self.position, self.strategy
        trained = [self.dtypes_of(each) for each in self.all_trained()]
        nbytes = {
            name: sum(layout.numel * self.dtypes_of(layout).reduce.itemsize for layout in of_unit)
            for name, of_unit in self.trained.items()
        }
        widest = max((each.reduce.itemsize for each in trained), default=4)
        blocks = self.order.blocks if strategy.shards_params and position.num_shards > 1 else ()
        largest = max((nbytes[name] for name in blocks), default=0) or max(nbytes.values())
        counts = {name: -(-size // largest) for name, size in nbytes.items() if size > largest}
        pieces = {name: _num_pieces(self.trained[name], count) for name, count in counts.items()}
        budget = largest * (1 if widest > 2 else 2)
        same_dtype = all(each.reduce == each.gradient for each in trained)
        # NCCL enqueues the sum over replicas on its own stream, without waiting on the host.
        sums_replicas = strategy.replicates and position.num_replicas > 1
        is_chained = sums_replicas and position.transport is Transport.NCCL
        chained = position.num_shards if is_chained else 0
        in_place = self.uses_all_reduce and same_dtype
        return Reductions(nbytes, budget, in_place, pieces, chained, self.combines)

    @property
    def outbox_bytes(self) -> int:
        """The bytes of this rank's outbox: gradients in shared memory that other ranks read."""
        shares = self.position.transport is Transport.SHARED
        return self.reductions.most_in_flight_bytes if shares else 0

    @property
    def shared_bytes(self) -> int:
        """The bytes of memory that all ranks share: unshard buffers and outboxes."""
        buffers = sum(each.nbytes for each in self.unshard_buffers)
        shares = self.position.transport is Transport.SHARED
        return buffers + self.position.num_shards * self.outbox_bytes if shares else 0
