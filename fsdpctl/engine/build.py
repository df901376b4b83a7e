"""Builds the runtime of a model: its units, their memory, and this rank's shards."""

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
    """The source of a model's initial values, and its device."""

    device: torch.device
    # Writes the values of a parameter by its name; None: rank 0's parameters are broadcast.
    initialize: Callable[[str, Tensor], None] | None = None
    # Whether values are zeros that a checkpoint overwrites. No full unit is allocated for them.
    is_empty: bool = False


@dataclass(frozen=True, slots=True)
class Sharding:
    """The arguments of `shard_model`."""

    strategy: str | Strategy = "full_shard"
    units: str | Sequence[type[nn.Module]] = "auto"
    dp_shard_size: int | None = None
    owner_map: str | OwnerMap = "even"
    prefetch: Prefetch = Prefetch()
    precision: Precision = Precision()
    offload: str | Offload = "none"  # states in host memory, as in strategy.offload
    share_memory: bool = False  # CPU ranks of one machine share the unsharded parameters

    def __post_init__(self) -> None:
        for name, kind in (("prefetch", Prefetch), ("precision", Precision)):
            if not isinstance(value := getattr(self, name), kind):
                problem = f"{name}: expected a fsdpctl.{kind.__name__}, got {value!r:.60}"
                raise UsageError(f"{problem}; pass {name}=fsdpctl.{kind.__name__}(…)")

    @property
    def on_host(self) -> Offload:
        return self.offload if isinstance(self.offload, Offload) else Offload.parse(self.offload)


@dataclass(frozen=True, slots=True)
class _Builder:
    """The arguments that are the same for every unit."""

    plan: StepPlan
    mesh: Mesh
    source: WeightInit
    params: dict[str, nn.Parameter]
    host: HostStates | None  # master weights in host memory
    host_params: HostParams | None  # parameters in host memory
    scratches: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def init_dtype(self, layout: FlatLayout) -> torch.dtype:
        """Return the dtype of initial values, which has all bits of the master weights."""
        return torch_dtype(self.plan.dtypes_of(layout).initial)

    def scratch(self, dtype: torch.dtype) -> Tensor:
        """Return memory for initial values, large enough for the largest flat buffer.

        Memory per buffer would leave gaps of different sizes in the allocator, between the shards
        that live as long as the model.
        """
        if dtype not in self.scratches:
            layouts = (each for of in self.plan.layouts.values() for each in of)
            largest = max(each.numel for each in layouts if self.init_dtype(each) == dtype)
            self.scratches[dtype] = torch.empty(largest, dtype=dtype, device=self.source.device)
        return self.scratches[dtype]

    def unit(self, spec: UnitSpec, unshard_buffer: UnshardBuffer) -> ShardedUnit:
        buffers, offset = [], 0
        for layout in self.plan.layouts[spec.name]:
            dtype = torch_dtype(self.plan.dtypes_of(layout).compute)
            full = unshard_buffer.view(offset, layout.numel, dtype)
            offset += full.nbytes
            buffers.append(self.buffer(spec.name, layout, full))
        unit = ShardedUnit(spec.name, buffers, unshard_buffer)
        if not self.plan.strategy.shards_params:
            unit.unshard()
        else:
            unit.free()
        return unit

    @torch.no_grad()
    def buffer(self, unit: str, layout: FlatLayout, full: Tensor) -> FlatBuffer:
        position, placement = self.plan.position, self.plan.placement(layout)
        master, resident = self.allocate(placement, full, trainable=layout.trainable)
        owned_span = layout.owned_span(position.rank, position.replica)
        owners = position.num_replicas // layout.shares_per_shard
        saved_span = aligned_chunk(owned_span, position.replica % owners, owners)
        span = placement.master_span
        spans = {"span": span, "owned_span": owned_span, "saved_span": saved_span}
        shard = FlatShard(unit, layout, master, **spans, num_owners=owners)
        if placement.dtypes.has_remainders:
            if self.host is not None:
                remainder = self.host.remainder(span.numel)
            else:
                remainder = torch.zeros(span.numel, dtype=torch.int8, device=full.device)
            shard.add_remainder(remainder, torch_dtype(placement.dtypes.gradient))
        if not self.source.is_empty:
            _fill(shard, resident, self.initial_values(layout))
        else:
            for target in [master, *([resident.values] if resident else [])]:
                target.zero_()
        # From here on, reading `shard.master` waits for the host; the values above are complete.
        if placement.master_location is StorageLocation.HOST:
            shard.mark_on_host(self.source.device, self.synchronize)
        params = [self.params[p.name] for p in layout.params]
        return FlatBuffer(shard, params, full, resident, torch_dtype(placement.dtypes.reduce))

    def allocate(
        self, placement: ShardPlacement, full: Tensor, *, trainable: bool
    ) -> tuple[Tensor, ResidentParams | None]:
        """Return memory for the masters, and resident parameters unless masters serve as these."""
        dtype, numel = torch_dtype(placement.dtypes.master), placement.master_span.numel
        device, resident = self.source.device, None
        match placement.param_location:
            case StorageLocation.UNSHARD_BUFFER:
                resident = ResidentParams(placement.param_span, full)
            case StorageLocation.DEVICE:
                values = torch.empty(placement.param_span.numel, dtype=full.dtype, device=device)
                resident = ResidentParams(placement.param_span, values)
            case StorageLocation.HOST:
                assert self.host_params is not None
                values = self.host_params.take(placement.param_span.numel, full.dtype)
                resident = ResidentParams(placement.param_span, values, is_on_host=True)
        if placement.master_location is StorageLocation.DEVICE:
            return torch.empty(numel, dtype=dtype, device=device), resident
        if placement.master_location is StorageLocation.PARAMS:
            assert resident is not None
            return resident.view(placement.master_span), resident
        if not trainable:
            assert self.host_params is not None
            return self.host_params.take(numel, dtype), resident
        assert self.host is not None
        master = self.host.master(numel, dtype)
        if placement.param_location is StorageLocation.MASTERS:
            resident = ResidentParams(placement.master_span, master, is_on_host=True)
        return master, resident

    def synchronize(self) -> None:
        """Wait until neither the host's thread nor copies use parameters in host memory."""
        if self.host is not None:
            self.host.synchronize()
        if self.host_params is not None:
            self.host_params.copier.synchronize()

    def initial_values(self, layout: FlatLayout) -> Tensor:
        """Return the full flat buffer in master precision; valid until the next call. Collective.

        All ranks must call this in the order of the units, since rank 0 broadcasts its values.
        """
        flat = self.scratch(self.init_dtype(layout))[: layout.numel].zero_()
        for param_span in layout.param_spans:
            name, span = param_span.param.name, param_span.span
            view = flat[span.start : span.stop].view(param_span.param.shape)
            if self.source.initialize is None:
                view.copy_(self.params[name])
            else:
                self.source.initialize(name, view)
        return self.mesh.world.broadcast(flat) if self.source.initialize is None else flat


def _fill(shard: FlatShard, resident: ResidentParams | None, values: Tensor) -> None:
    """Write the full flat buffer `values` to a rank's masters and parameters; it is overwritten."""
    shard.write_span(shard.span, values[shard.span.start : shard.span.stop])
    if resident is None:
        return
    shard_values = values[resident.span.start : resident.span.stop]
    if shard.remainder is None:
        resident.values.copy_(shard_values)
    else:
        # Other ranks send the upper half of their masters after a step. A plain cast would round
        # some values otherwise, so parameters would differ before and after the first step.
        remainder = torch.empty_like(shard_values, dtype=torch.int8)
        split_24_bits(shard_values, resident.values, remainder)


@torch.no_grad()
def broadcast_buffers(module: nn.Module, device: torch.device, collectives: Collectives) -> None:
    """Move buffers to `device`, with the values of rank 0. Collective."""
    for each in module.modules():
        for key, buffer in each._buffers.items():
            if buffer is not None:
                moved = buffer.to(device).contiguous()
                # Broadcast as bytes, because no backend supports every dtype.
                collectives.broadcast(moved.view(-1).view(torch.uint8))
                each._buffers[key] = moved


def build_runtime(module: nn.Module, plan: StepPlan, mesh: Mesh, source: WeightInit) -> Runtime:
    """Shard `module`'s parameters in place, and hook its events. Collective.

    All ranks must have the same `module` and `plan`: otherwise their collectives would not match.
    """
    empty = partial(torch.empty, 0, device=source.device)  # a meta parameter cannot get memory
    replace_meta_parameters(module, lambda param: empty(dtype=param.dtype))
    broadcast_buffers(module, source.device, mesh.world)
    params = dict(module.named_parameters())
    host, host_params = _make_host_memory(plan, mesh, source.device)
    builder = _Builder(plan, mesh, source, params, host, host_params)
    units = _build_units(builder)
    for param in params.values():
        param.grad = None  # gradients from before sharding would be added to the next ones
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


def _make_host_memory(
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
    plan, specs = builder.plan, builder.plan.unshard_buffers
    buffer_index = {unit: index for index, slot in enumerate(specs) for unit in slot.units}
    shared = builder.mesh.shard.allocate_shared([each.nbytes for each in specs])
    buffers: dict[int, UnshardBuffer] = {}
    units = []
    # The builder frees a sharded unit before the next buffer is allocated, so that the full units
    # of a large model never exist at the same time.
    for spec in plan.model_layout.units:
        index = buffer_index[spec.name]
        if index not in buffers:
            is_permanent = specs[index].is_permanent or not plan.strategy.shards_params
            size, device = specs[index].nbytes, builder.source.device
            memory = (
                shared[index] if shared else torch.empty(size, dtype=torch.uint8, device=device)
            )
            sharers = builder.mesh.shard.size if shared else 1
            buffers[index] = UnshardBuffer(
                spec.name, memory, is_permanent=is_permanent, sharers=sharers
            )
        units.append(builder.unit(spec, buffers[index]))
    if shared:
        # Each rank writes the full values to the shared buffers. Without a barrier, a slow rank
        # could overwrite a gathered unit with initial values after the first step.
        builder.mesh.shard.barrier()
    return units
