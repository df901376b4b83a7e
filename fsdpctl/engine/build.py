"""Building a runtime: dividing a module into units, with memory and this rank's shards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fsdpctl.comm.codes import split
from fsdpctl.comm.collectives import Mesh
from fsdpctl.comm.host import HostWorker
from fsdpctl.comm.shards import FlatShard
from fsdpctl.engine.buffer import Resting, UnitBuffer
from fsdpctl.engine.describe import replace_meta_parameters
from fsdpctl.engine.entry import move_buffers
from fsdpctl.engine.gradients import GradientReducer
from fsdpctl.engine.hooks import hook_gradients, hook_root, hook_unit
from fsdpctl.engine.host_params import HostParams
from fsdpctl.engine.offload import HostPart, HostStates
from fsdpctl.engine.precision import Precision
from fsdpctl.engine.runtime import Runtime
from fsdpctl.engine.unit import ShardedUnit, Slot
from fsdpctl.errors import UsageError
from fsdpctl.plan.layout import FlatLayout, Span, share_of
from fsdpctl.plan.offload import Offload
from fsdpctl.plan.owners import OwnerMap
from fsdpctl.plan.schedule import Buffer, Prefetch, Schedule
from fsdpctl.plan.sizes import SlotSpec, slots_of
from fsdpctl.plan.strategy import Strategy
from fsdpctl.plan.transfers import Transfers
from fsdpctl.plan.units import Division, UnitSpec


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a model's values, and their device."""

    device: torch.device
    initialize: Callable[[str, Tensor], None] | None = None  # None: rank 0's parameters
    is_empty: bool = False  # zeros that will be overwritten; no rank ever allocates a full unit


@dataclass(frozen=True, slots=True)
class Sharding:
    """The arguments of `shard_model`."""

    strategy: str | Strategy = "full_shard"
    units: str | Sequence[type[nn.Module]] = "auto"
    dp_shard_size: int | None = None
    owner_map: str | OwnerMap = "even"
    prefetch: Prefetch = Prefetch()
    precision: Precision = Precision()
    offload: str | Offload = "none"  # in host memory, as strategy.offload: a word or a list
    share_memory: bool = False  # between the ranks of one machine, on the CPU

    @property
    def on_host(self) -> Offload:
        """The states that are in host memory."""
        return self.offload if isinstance(self.offload, Offload) else Offload.parse(self.offload)


@dataclass(frozen=True, slots=True)
class _Builder:
    """The arguments with which every unit is built."""

    division: Division
    precision: Precision
    mesh: Mesh
    source: Source
    params: dict[str, nn.Parameter]
    dtypes: dict[str, torch.dtype]  # of the parameters as the user made them
    host: HostStates | None = None  # of trained parameters
    host_params: HostParams | None = None
    scratches: dict[torch.dtype, Tensor] = field(default_factory=dict)

    @property
    def strategy(self) -> Strategy:
        return self.division.strategy

    def layouts(self, spec: UnitSpec) -> tuple[FlatLayout, ...]:
        return self.division.layouts[spec.name]

    def compute_dtype(self, layout: FlatLayout) -> torch.dtype:
        return self.precision.compute_dtype(self.dtypes[layout.params[0].name])

    def master_dtype(self, layout: FlatLayout) -> torch.dtype:
        """Return the dtype of master weights; frozen parameters are kept in the compute dtype."""
        if not layout.trainable:
            return self.compute_dtype(layout)
        return self.precision.dtype_of_master(self.dtypes[layout.params[0].name])

    def value_dtype(self, layout: FlatLayout) -> torch.dtype:
        """Return the dtype in which values are drawn, which has all bits of master weights."""
        has_remainder = layout.trainable and self.precision.has_remainders
        return torch.float32 if has_remainder else self.master_dtype(layout)

    def scratch(self, dtype: torch.dtype) -> Tensor:
        """Return memory for the largest buffer; many scratches would fragment the allocator."""
        if dtype not in self.scratches:
            layouts = (each for of in self.division.layouts.values() for each in of)
            largest = max(each.numel for each in layouts if self.value_dtype(each) == dtype)
            self.scratches[dtype] = torch.empty(largest, dtype=dtype, device=self.source.device)
        return self.scratches[dtype]

    def held(self, layout: FlatLayout) -> Span:
        """Return the elements whose master weights this rank has."""
        if not self.strategy.shards_optimizer:
            return Span(0, layout.numel)
        return layout.owned(self.mesh.shard.rank, self.mesh.replica_rank)

    def unit(self, spec: UnitSpec, slot: Slot) -> ShardedUnit:
        buffers, offset = [], 0
        for layout in self.layouts(spec):
            dtype = self.compute_dtype(layout)
            whole = slot.view(offset, layout.numel, dtype)
            offset += whole.nbytes
            buffers.append(self.buffer(spec.name, layout, whole))
        unit = ShardedUnit(spec.name, buffers, slot)
        if not self.strategy.shards_params:
            unit.unshard()
        else:
            unit.release()
        return unit

    @torch.no_grad()
    def buffer(self, unit: str, layout: FlatLayout, whole: Tensor) -> UnitBuffer:
        owned = layout.owned(self.mesh.shard.rank, self.mesh.replica_rank)
        held = self.held(layout)
        dtype, resting = self.master_dtype(layout), self.resting_values(layout, whole)
        if self.host is not None and layout.trainable:
            master = self.host.master(held.numel, dtype)
            if self.host_params and whole.dtype == dtype:
                resting = Resting(held, master, is_on_host=True)
        elif resting is not None and whole.dtype == dtype:
            master = resting.within(held)
        elif self.host_params is not None and not layout.trainable:
            master = self.host_params.take(held.numel, dtype)
        else:
            master = torch.empty(held.numel, dtype=dtype, device=self.source.device)
        owners = self.mesh.num_replicas // layout.shares
        written = share_of(owned, self.mesh.replica_rank % owners, owners)
        shard = FlatShard(
            unit, layout, master, held=held, owned=owned, written=written, num_owners=owners
        )
        if layout.trainable and self.precision.has_remainders:
            if self.host is not None:
                remainder = self.host.remainder(held.numel)
            else:
                remainder = torch.zeros(held.numel, dtype=torch.int8, device=self.source.device)
            shard.add_remainder(remainder, self.precision.dtype_of_gradient(dtype))
        if not self.source.is_empty:
            _fill(shard, resting, self.initial_values(layout))
        else:
            for target in [master, *([resting.values] if resting else [])]:
                target.zero_()
        if (self.host if layout.trainable else self.host_params) is not None:
            shard.put_on_host(self.source.device, self.settle)
        return UnitBuffer(shard, [self.params[p.name] for p in layout.params], whole, resting)

    def resting_values(self, layout: FlatLayout, whole: Tensor) -> Resting | None:
        """Return the parameters in the compute dtype that remain between steps."""
        if not self.strategy.shards_params:
            return Resting(Span(0, layout.numel), whole)
        if layout.shares == 1 and not (self.host and layout.trainable):
            return None
        part = layout.parts[self.mesh.shard.rank]
        if self.host_params is None:
            return Resting(part, torch.empty(part.numel, dtype=whole.dtype, device=whole.device))
        if whole.dtype == self.master_dtype(layout):
            return None  # those are the masters
        return Resting(part, self.host_params.take(part.numel, whole.dtype), is_on_host=True)

    def settle(self) -> None:
        """Wait for what uses or writes parameters in host memory."""
        if self.host is not None:
            self.host.settle()
        if self.host_params is not None:
            self.host_params.settle()

    def initial_values(self, layout: FlatLayout) -> Tensor:
        """Return the full flat buffer with all bits of masters; valid until the next call."""
        flat = self.scratch(self.value_dtype(layout))[: layout.numel].zero_()
        for placement in layout.placements:
            name, span = placement.param.name, placement.span
            view = flat[span.start : span.stop].view(placement.param.shape)
            if self.source.initialize is None:
                view.copy_(self.params[name])
            else:
                self.source.initialize(name, view)
        return self.mesh.world.broadcast(flat) if self.source.initialize is None else flat


def _fill(shard: FlatShard, resting: Resting | None, values: Tensor) -> None:
    """Write a full flat buffer, which is overwritten, to a rank's masters and parameters."""
    shard.write(shard.held, values[shard.held.start : shard.held.stop])
    if resting is None:
        return
    part = values[resting.span.start : resting.span.stop]
    if shard.remainder is None:
        resting.values.copy_(part)
    else:  # rounded as the masters that other ranks send
        split(part, resting.values, torch.empty_like(part, dtype=torch.int8))


def build_runtime(
    module: nn.Module, division: Division, mesh: Mesh, source: Source, sharding: Sharding
) -> Runtime:
    """Shard `module`'s parameters in place, and hook its events.

    All ranks must have agreed on the arguments.
    """
    dtypes = {name: param.dtype for name, param in module.named_parameters()}
    replace_meta_parameters(module, source.device)
    move_buffers(module, source.device, mesh.world)
    params = dict(module.named_parameters())
    builder = _Builder(division, sharding.precision, mesh, source, params, dtypes)
    if sharding.on_host:
        builder = _with_host(builder, sharding.on_host)
    strategy, prefetch = division.strategy, sharding.prefetch

    def itemsize(layout: FlatLayout) -> int:
        return builder.compute_dtype(layout).itemsize

    slots = slots_of(strategy, division.layouts, itemsize, prefetch.depth)
    units = _build_units(builder, slots)
    for param in params.values():
        param.grad = None  # it does not belong to the sharded model
    reducer = _make_reducer(units, builder)
    schedule = Schedule(division.order, strategy, prefetch, reducer.plan, slots)
    runtime = Runtime(units, schedule, mesh, reducer)
    runtime.host_params = builder.host_params
    if builder.host is not None:
        runtime.host, builder.host.on_start = builder.host, runtime.step_on_host
        reducer.leaving = builder.host.gradients()
    runtime.parameters.remember(module, gathers=strategy.shards_params)
    hook_root(module, runtime, sharding.precision.param_dtype)
    for unit in runtime.units.values():
        if not strategy.shards_params or unit is runtime.root:
            hook_gradients(runtime, unit)
        if unit is not runtime.root:
            hook_unit(module.get_submodule(unit.name), runtime, unit)
    return runtime


def _with_host(builder: _Builder, offload: Offload) -> _Builder:
    """Allocate host memory for what is there.

    Raises:
        UsageError: If the strategy or other arguments do not allow it.
    """
    strategy, precision = builder.strategy, builder.precision
    if refusal := offload.refusal(strategy, strategy, builder.mesh.world.size):
        raise UsageError(f"strategy.offload={offload}: {refusal}")
    layouts = [each for of in builder.division.layouts.values() for each in of]
    trained = [each for each in layouts if each.trainable]
    offload.check_rests(trains_all=len(trained) == len(layouts))
    steps, rests = Offload.STATES in offload, Offload.PARAMS in offload
    worker = HostWorker(builder.source.device)
    if rests:
        apart = [
            (builder.held(each).numel, builder.compute_dtype(each))
            for each in layouts
            if not each.trainable
            or (steps and builder.compute_dtype(each) != builder.master_dtype(each))
        ]
        builder = replace(builder, host_params=HostParams(worker, apart))
    if not steps:
        return builder
    parts = [
        HostPart(
            builder.held(each).numel,
            dtype := builder.master_dtype(each),
            builder.compute_dtype(each),
            precision.dtype_of_gradient(dtype),
        )
        for each in trained
    ]
    with_gradients = Offload.GRADIENTS in offload
    host = HostStates(worker, parts, with_gradients=with_gradients, with_params=rests)
    return replace(builder, host=host)


def _make_reducer(units: Sequence[ShardedUnit], builder: _Builder) -> GradientReducer:
    division, mesh = builder.division, builder.mesh
    shards = [buffer.shard for unit in units for buffer in unit.trained_buffers]
    dtypes = {each.dtype: builder.precision.dtype_of_reduction(each.dtype) for each in shards}

    def itemsize(layout: FlatLayout) -> int:
        return dtypes[builder.master_dtype(layout)].itemsize

    shard = mesh.shard
    transfers = Transfers(builder.strategy, shard.transport, shard.size, mesh.num_replicas)
    plan = transfers.reductions(
        division.layouts,
        division.order,
        itemsize,
        same_dtype=all(each.grad_dtype == dtypes[each.dtype] for each in shards),
    )
    reducer = GradientReducer(units, mesh, transfers, plan, dtypes)
    if outbox := shard.reserve(plan.most_in_flight):
        reducer.ledger.allocate(Buffer.OUTBOX, division.order.root, 0, outbox)
    return reducer


def _build_units(builder: _Builder, slots: Sequence[SlotSpec]) -> list[ShardedUnit]:
    specs = builder.division.units
    slot_of = {unit: number for number, slot in enumerate(slots) for unit in slot.units}
    shared = builder.mesh.shard.allocate([each.nbytes for each in slots])
    made: dict[int, Slot] = {}
    units = []
    for spec in specs:  # in order: a slot that can be freed is freed before the next one is made
        number = slot_of[spec.name]
        if number not in made:
            resident = slots[number].resident or not builder.strategy.shards_params
            size, device = slots[number].nbytes, builder.source.device
            memory = (
                shared[number] if shared else torch.empty(size, dtype=torch.uint8, device=device)
            )
            sharers = builder.mesh.shard.size if shared else 1
            made[number] = Slot(spec.name, memory, resident=resident, sharers=sharers)
        units.append(builder.unit(spec, made[number]))
    if shared:
        builder.mesh.shard.barrier()  # all ranks have written the same values
    return units
