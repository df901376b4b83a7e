"""Builds the runtime of a model: its units, their memory, and this rank's shards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from fsdpctl.comm.collectives import Collectives
from fsdpctl.comm.flat_shard import FlatShard
from fsdpctl.comm.mesh import Mesh
from fsdpctl.comm.quantized_states import split_24_bits
from fsdpctl.engine.flat_buffer import FlatBuffer, StoredParams
from fsdpctl.engine.gradients import GradientReducer
from fsdpctl.engine.hooks import hook_backward_at_parameters, hook_root, hook_unit
from fsdpctl.engine.host_worker import HostWorker
from fsdpctl.engine.offload import HostStates
from fsdpctl.engine.runtime import Runtime
from fsdpctl.engine.unit import HostParamPool, ShardedUnit, UnshardBuffer
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
    """The initial values of a model, and the device that it is sharded on."""

    device: torch.device
    # Writes the values of a parameter by its name; None: rank 0's parameters are broadcast.
    initialize: Callable[[str, Tensor], None] | None = None
    is_zero: bool = False  # a checkpoint overwrites the zeros; no full unit is allocated


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
    def offloaded(self) -> Offload:
        return self.offload if isinstance(self.offload, Offload) else Offload.parse(self.offload)


@dataclass(frozen=True, slots=True)
class _Builder:
    """A builder of units, with the arguments that all units have in common."""

    plan: StepPlan
    mesh: Mesh
    source: WeightInit
    params: dict[str, nn.Parameter]
    host: HostStates | None  # master weights in host memory
    host_params: HostParamPool | None  # parameters in host memory
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
            layouts = chain.from_iterable(self.plan.layouts.values())
            largest = max(each.numel for each in layouts if self.init_dtype(each) == dtype)
            self.scratches[dtype] = torch.empty(largest, dtype=dtype, device=self.source.device)
        return self.scratches[dtype]

    def build_unit(self, spec: UnitSpec, unshard_buffer: UnshardBuffer) -> ShardedUnit:
        """Build a unit. Collective, unless its values are zero; see `initial_values`."""
        buffers, offset = [], 0
        for layout in self.plan.layouts[spec.name]:
            dtype = torch_dtype(self.plan.dtypes_of(layout).compute)
            full = unshard_buffer.view(offset, layout.numel, dtype)
            offset += full.nbytes
            buffers.append(self.build_buffer(spec.name, layout, full))
        unit = ShardedUnit(spec.name, buffers, unshard_buffer)
        if self.plan.strategy.shards_params:
            unit.free()
        else:
            unit.unshard()
        return unit

    @torch.no_grad()
    def build_buffer(self, unit: str, layout: FlatLayout, full: Tensor) -> FlatBuffer:
        position, placement = self.plan.position, self.plan.placement(layout)
        master, stored = self.allocate(placement, full, trainable=layout.trainable)
        owned_span = layout.owned_span(position.rank, position.replica)
        owners = position.num_replicas // layout.shares_per_shard
        saved_span = aligned_chunk(owned_span, position.replica % owners, owners)
        spans = {"span": placement.master_span, "owned_span": owned_span, "saved_span": saved_span}
        shard = FlatShard(unit, layout, master, **spans, num_owners=owners)
        if placement.dtypes.has_remainders:
            if self.host is not None:
                remainder = self.host.take_remainder(master.numel())
            else:
                remainder = torch.zeros(master.numel(), dtype=torch.int8, device=full.device)
            shard.add_remainder(remainder, torch_dtype(placement.dtypes.gradient))
        if not self.source.is_zero:
            _fill(shard, stored, self.initial_values(layout))
        else:
            master.zero_()
            if stored is not None:
                stored.values.zero_()
        # From here on, reading `shard.master` waits for the host; the values above are complete.
        if placement.master_location is StorageLocation.HOST:
            # Not a method: the shard would keep the builder, and so the memory of `scratch`.
            synchronize = partial(_synchronize_host, self.host, self.host_params)
            shard.mark_on_host(self.source.device, synchronize)
        params = [self.params[p.name] for p in layout.params]
        return FlatBuffer(shard, params, full, stored, torch_dtype(placement.dtypes.reduce))

    def allocate(
        self, placement: ShardPlacement, full: Tensor, *, trainable: bool
    ) -> tuple[Tensor, StoredParams | None]:
        """Return memory for the masters and the stored parameters (None: masters are gathered)."""
        dtype, numel = torch_dtype(placement.dtypes.master), placement.master_span.numel
        device, stored = self.source.device, None
        match placement.param_location:
            case StorageLocation.UNSHARD_BUFFER:
                stored = StoredParams(placement.param_span, full)
            case StorageLocation.DEVICE:
                values = torch.empty(placement.param_span.numel, dtype=full.dtype, device=device)
                stored = StoredParams(placement.param_span, values)
            case StorageLocation.HOST:
                assert self.host_params is not None
                values = self.host_params.take(placement.param_span.numel, full.dtype)
                stored = StoredParams(placement.param_span, values, is_on_host=True)
        if placement.master_location is StorageLocation.DEVICE:
            return torch.empty(numel, dtype=dtype, device=device), stored
        if placement.master_location is StorageLocation.PARAMS:
            assert stored is not None
            return stored.view(placement.master_span), stored
        if not trainable:  # frozen masters on the host are also what is gathered
            assert self.host_params is not None
            return self.host_params.take(numel, dtype), stored
        assert self.host is not None
        master = self.host.take_master(numel, dtype)
        if placement.param_location is StorageLocation.MASTERS:
            stored = StoredParams(placement.master_span, master, is_on_host=True)
        return master, stored

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


def _synchronize_host(host: HostStates | None, host_params: HostParamPool | None) -> None:
    """Wait until neither the host's thread nor copies use parameters in host memory."""
    if host is not None:
        host.synchronize()
    if host_params is not None:
        host_params.copier.synchronize_to_device()


def _fill(shard: FlatShard, stored: StoredParams | None, values: Tensor) -> None:
    """Write a full flat buffer to this rank's masters and parameters; overwrites `values`."""
    shard.write_span(shard.span, values[shard.span.start : shard.span.stop])
    if stored is None:
        return
    shard_values = values[stored.span.start : stored.span.stop]
    if shard.remainder is None:
        stored.values.copy_(shard_values)
    else:
        # Other ranks send the upper 16 bits of their masters after a step. A plain cast rounds some
        # values differently, so parameters would differ before and after the first step.
        remainder = torch.empty_like(shard_values, dtype=torch.int8)
        split_24_bits(shard_values, stored.values, remainder)


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
    device = source.device
    # The data of a meta parameter cannot be set, so another parameter replaces it.
    replace_meta_parameters(module, lambda p: torch.empty(0, dtype=p.dtype, device=device))
    broadcast_buffers(module, device, mesh.world)
    params = dict(module.named_parameters())
    host, host_params = _make_host_memory(plan, device)
    builder = _Builder(plan, mesh, source, params, host, host_params)
    units = _build_units(builder)
    for param in params.values():
        param.grad = None  # gradients from before sharding would be added to the next ones
    reducer = GradientReducer(units, mesh, plan)
    if outbox := mesh.shard.reserve_outbox(plan.reductions.most_in_flight_bytes):
        reducer.accounting.allocate(BufferKind.OUTBOX, plan.order.root, index=0, nbytes=outbox)
    runtime = Runtime(units, plan, mesh, reducer)
    runtime.host_params = host_params
    if host is not None:
        runtime.host, host.start = host, runtime.step_on_host
        reducer.offload = host.gradient_offload()
    gathers = plan.strategy.shards_params
    runtime.snapshot.remember(module, has_gather_hooks=gathers)
    compute = plan.precision.param_dtype
    hook_root(module, runtime, None if compute is None else torch_dtype(str(compute)))
    for unit in runtime.units.values():
        # The loss can use parameters that stay unsharded after the forward.
        if not gathers or unit is runtime.root:
            hook_backward_at_parameters(runtime, unit)
        if unit is not runtime.root:
            hook_unit(module.get_submodule(unit.name), runtime, unit)
    return runtime


def _make_host_memory(
    plan: StepPlan, device: torch.device
) -> tuple[HostStates | None, HostParamPool | None]:
    if not plan.offload:
        return None, None
    plan.check_offload()
    worker, memory = HostWorker(device), plan.host_memory
    params = HostParamPool(worker, memory.params) if Offload.PARAMS in plan.offload else None
    return HostStates(worker, memory) if plan.steps_on_host else None, params


def _build_units(builder: _Builder) -> list[ShardedUnit]:
    plan, shard_group = builder.plan, builder.mesh.shard
    specs = plan.unshard_buffers
    buffer_index = {unit: index for index, spec in enumerate(specs) for unit in spec.units}
    shared = shard_group.allocate_shared([spec.nbytes for spec in specs])
    empty = partial(torch.empty, dtype=torch.uint8, device=builder.source.device)
    buffers: dict[int, UnshardBuffer] = {}
    units = []
    # The builder frees a sharded unit before the next buffer is allocated, so that the full units
    # of a large model never exist at the same time.
    for unit_spec in plan.model_layout.units:
        index = buffer_index[unit_spec.name]
        if index not in buffers:
            spec, num_sharers = specs[index], shard_group.size if shared else 1
            is_permanent = spec.is_permanent or not plan.strategy.shards_params
            memory = shared[index] if shared else empty(spec.nbytes)
            buffers[index] = UnshardBuffer(
                unit_spec.name, memory, is_permanent=is_permanent, num_sharers=num_sharers
            )
        units.append(builder.build_unit(unit_spec, buffers[index]))
    if shared:
        # Each rank writes the full values to the shared buffers. Without a barrier, a slow rank
        # could overwrite a gathered unit with initial values after the first step.
        shard_group.barrier()
    return units
