"""Building a runtime: dividing a module into units, with memory and this rank's shards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from fsdpctl.comm.collectives import Collectives
from fsdpctl.comm.flat_shard import FlatShard
from fsdpctl.comm.mesh import Mesh
from fsdpctl.comm.quantized_states import split_24_bits
from fsdpctl.engine.flat_buffer import FlatBuffer, ResidentParams
from fsdpctl.engine.gradients import GradientReducer
from fsdpctl.engine.hooks import hook_backward_at_parameters, hook_root, hook_unit
from fsdpctl.engine.host_worker import HostWorker
from fsdpctl.engine.offload import HostStates
from fsdpctl.engine.runtime import Runtime
from fsdpctl.engine.unit import HostParams, ShardedUnit, UnshardBuffer
from fsdpctl.errors import UsageError
from fsdpctl.models.module_spec import replace_meta_parameters, torch_dtype
from fsdpctl.plan.layout import FlatLayout, aligned_chunk
from fsdpctl.plan.owner_map import OwnerMap
from fsdpctl.plan.precision import Precision
from fsdpctl.plan.schedule import BufferKind
from fsdpctl.plan.step_plan import Prefetch, ShardPlacement, StepPlan, StorageLocation
from fsdpctl.plan.strategy import Offload, Strategy
from fsdpctl.plan.units import UnitSpec


@dataclass(frozen=True, slots=True)
class WeightInit:
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

    def __post_init__(self) -> None:
        for name, kind in (("prefetch", Prefetch), ("precision", Precision)):
            if not isinstance(given := getattr(self, name), kind):
                what = f"{name}: expected a fsdpctl.{kind.__name__}, got {given!r:.60}"
                raise UsageError(f"{what}; pass {name}=fsdpctl.{kind.__name__}(…)")

    @property
    def on_host(self) -> Offload:
        return self.offload if isinstance(self.offload, Offload) else Offload.parse(self.offload)


@dataclass(frozen=True, slots=True)
class _Builder:
    """The arguments with which every unit is built."""

    plan: StepPlan
    mesh: Mesh
    source: WeightInit
    params: dict[str, nn.Parameter]
    host: HostStates | None  # of trained parameters
    host_params: HostParams | None
    scratches: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def init_dtype(self, layout: FlatLayout) -> torch.dtype:
        """Return the dtype in which values are drawn, which has all bits of master weights."""
        return torch_dtype(self.plan.dtypes_of(layout).initial)

    def scratch(self, dtype: torch.dtype) -> Tensor:
        """Return memory for the largest buffer; many scratches would fragment the allocator."""
        if dtype not in self.scratches:
            layouts = (each for of in self.plan.layouts.values() for each in of)
            largest = max(each.numel for each in layouts if self.init_dtype(each) == dtype)
            self.scratches[dtype] = torch.empty(largest, dtype=dtype, device=self.source.device)
        return self.scratches[dtype]

    def unit(self, spec: UnitSpec, slot: UnshardBuffer) -> ShardedUnit:
        buffers, offset = [], 0
        for layout in self.plan.layouts[spec.name]:
            dtype = torch_dtype(self.plan.dtypes_of(layout).compute)
            whole = slot.view(offset, layout.numel, dtype)
            offset += whole.nbytes
            buffers.append(self.buffer(spec.name, layout, whole))
        unit = ShardedUnit(spec.name, buffers, slot)
        if not self.plan.strategy.shards_params:
            unit.unshard()
        else:
            unit.free()
        return unit

    @torch.no_grad()
    def buffer(self, unit: str, layout: FlatLayout, whole: Tensor) -> FlatBuffer:
        place, rest = self.plan.position, self.plan.placement(layout)
        master, resting = self.allocate(rest, whole, trainable=layout.trainable)
        owned = layout.owned_span(place.rank, place.replica)
        owners = place.num_replicas // layout.shares_per_shard
        written = aligned_chunk(owned, place.replica % owners, owners)
        shard = FlatShard(
            unit,
            layout,
            master,
            span=rest.master_span,
            owned_span=owned,
            saved_span=written,
            num_owners=owners,
        )
        if rest.dtypes.has_remainder:
            if self.host is not None:
                remainder = self.host.remainder(rest.master_span.numel)
            else:
                remainder = torch.zeros(
                    rest.master_span.numel, dtype=torch.int8, device=whole.device
                )
            shard.add_remainder(remainder, torch_dtype(rest.dtypes.gradient))
        if not self.source.is_empty:
            _fill(shard, resting, self.initial_values(layout))
        else:
            for target in [master, *([resting.values] if resting else [])]:
                target.zero_()
        if rest.master_location is StorageLocation.HOST:
            shard.mark_on_host(self.source.device, self.synchronize)
        params = [self.params[p.name] for p in layout.params]
        return FlatBuffer(shard, params, whole, resting, torch_dtype(rest.dtypes.reduce))

    def allocate(
        self, rest: ShardPlacement, whole: Tensor, *, trainable: bool
    ) -> tuple[Tensor, ResidentParams | None]:
        """Return memory for masters, and for parameters in the compute dtype if they are apart."""
        dtype, numel, device = (
            torch_dtype(rest.dtypes.master),
            rest.master_span.numel,
            self.source.device,
        )
        resting: ResidentParams | None = None
        match rest.param_location:
            case StorageLocation.UNSHARD_BUFFER:
                resting = ResidentParams(rest.param_span, whole)
            case StorageLocation.DEVICE:
                values = torch.empty(rest.param_span.numel, dtype=whole.dtype, device=device)
                resting = ResidentParams(rest.param_span, values)
            case StorageLocation.HOST:
                assert self.host_params is not None
                values = self.host_params.take(rest.param_span.numel, whole.dtype)
                resting = ResidentParams(rest.param_span, values, is_on_host=True)
        if rest.master_location is StorageLocation.DEVICE:
            return torch.empty(numel, dtype=dtype, device=device), resting
        if rest.master_location is StorageLocation.PARAMS:
            assert resting is not None
            return resting.view(rest.master_span), resting
        if not trainable:
            assert self.host_params is not None
            return self.host_params.take(numel, dtype), resting
        assert self.host is not None
        master = self.host.master(numel, dtype)
        if rest.param_location is StorageLocation.MASTERS:
            resting = ResidentParams(rest.master_span, master, is_on_host=True)
        return master, resting

    def synchronize(self) -> None:
        """Wait for what uses or writes parameters in host memory."""
        if self.host is not None:
            self.host.synchronize()
        if self.host_params is not None:
            self.host_params.copier.synchronize()

    def initial_values(self, layout: FlatLayout) -> Tensor:
        """Return the full flat buffer with all bits of masters; valid until the next call."""
        flat = self.scratch(self.init_dtype(layout))[: layout.numel].zero_()
        for placement in layout.param_spans:
            name, span = placement.param.name, placement.span
            view = flat[span.start : span.stop].view(placement.param.shape)
            if self.source.initialize is None:
                view.copy_(self.params[name])
            else:
                self.source.initialize(name, view)
        return self.mesh.world.broadcast(flat) if self.source.initialize is None else flat


def _fill(shard: FlatShard, resting: ResidentParams | None, values: Tensor) -> None:
    """Write a full flat buffer, which is overwritten, to a rank's masters and parameters."""
    shard.write_span(shard.span, values[shard.span.start : shard.span.stop])
    if resting is None:
        return
    part = values[resting.span.start : resting.span.stop]
    if shard.remainder is None:
        resting.values.copy_(part)
    else:  # rounded as the masters that other ranks send
        split_24_bits(part, resting.values, torch.empty_like(part, dtype=torch.int8))


@torch.no_grad()
def move_buffers(module: nn.Module, device: torch.device, collectives: Collectives) -> None:
    """Move buffers to `device`, with the values of rank 0. Collective."""
    for each in module.modules():
        for key, buffer in each._buffers.items():
            if buffer is not None:
                moved = buffer.to(device).contiguous()
                # As bytes, because no backend supports every dtype.
                collectives.broadcast(moved.view(-1).view(torch.uint8))
                each._buffers[key] = moved


def build_runtime(module: nn.Module, plan: StepPlan, mesh: Mesh, source: WeightInit) -> Runtime:
    """Shard `module`'s parameters in place, and hook its events. Ranks have agreed on both."""
    empty = partial(torch.empty, 0, device=source.device)  # an object that can have memory
    replace_meta_parameters(module, lambda param: empty(dtype=param.dtype))
    move_buffers(module, source.device, mesh.world)
    params = dict(module.named_parameters())
    host, host_params = _on_host(plan, mesh, source.device)
    builder = _Builder(plan, mesh, source, params, host, host_params)
    units = _build_units(builder)
    for param in params.values():
        param.grad = None  # it does not belong to the sharded model
    reducer = GradientReducer(units, mesh, plan)
    if outbox := mesh.shard.reserve_outbox(plan.reductions.most_in_flight):
        reducer.accounting.allocate(BufferKind.OUTBOX, plan.order.root, 0, outbox)
    runtime = Runtime(units, plan, mesh, reducer)
    runtime.host_params = host_params
    if host is not None:
        runtime.host, host.on_start = host, runtime.step_on_host
        reducer.offload = host.gradients()
    gathers = plan.strategy.shards_params
    runtime.parameters.remember(module, gathers=gathers)
    compute = plan.precision.param_dtype
    hook_root(module, runtime, None if compute is None else torch_dtype(str(compute)))
    for unit in runtime.units.values():
        if not gathers or unit is runtime.root:
            hook_backward_at_parameters(runtime, unit)
        if unit is not runtime.root:
            hook_unit(module.get_submodule(unit.name), runtime, unit)
    return runtime


def _on_host(
    plan: StepPlan, mesh: Mesh, device: torch.device
) -> tuple[HostStates | None, HostParams | None]:
    offload = plan.offload
    if not offload:
        return None, None
    plan.check_offload()
    worker = HostWorker(device)
    params = HostParams(worker, plan.host_memory.params) if Offload.PARAMS in offload else None
    return HostStates(worker, plan.host_memory) if plan.steps_on_host else None, params


def _build_units(builder: _Builder) -> list[ShardedUnit]:
    plan, slots = builder.plan, builder.plan.unshard_buffers
    slot_of = {unit: number for number, slot in enumerate(slots) for unit in slot.units}
    shared = builder.mesh.shard.allocate_shared([each.nbytes for each in slots])
    made: dict[int, UnshardBuffer] = {}
    units = []
    # In order: a slot that can be freed is freed before the next one is made.
    for spec in plan.model_layout.units:
        number = slot_of[spec.name]
        if number not in made:
            resident = slots[number].is_permanent or not plan.strategy.shards_params
            size, device = slots[number].nbytes, builder.source.device
            memory = (
                shared[number] if shared else torch.empty(size, dtype=torch.uint8, device=device)
            )
            sharers = builder.mesh.shard.size if shared else 1
            made[number] = UnshardBuffer(spec.name, memory, is_permanent=resident, sharers=sharers)
        units.append(builder.unit(spec, made[number]))
    if shared:
        builder.mesh.shard.barrier()  # all ranks have written the same values
    return units
