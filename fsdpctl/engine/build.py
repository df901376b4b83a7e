"""Cuts a module into units, gives each its memory and this rank its shards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdpctl.comm.base import Collectives
from fsdpctl.engine.describe import describe_module, name_of_submodule, replace_meta_parameters
from fsdpctl.engine.hooks import hook_gradients, hook_root, hook_unit
from fsdpctl.engine.precision import Precision
from fsdpctl.engine.runtime import Runtime
from fsdpctl.engine.slots import Slot
from fsdpctl.engine.unit import ShardedUnit, UnitBuffer
from fsdpctl.errors import EngineError
from fsdpctl.plan.layout import FlatLayout, Span
from fsdpctl.plan.schedule import Prefetch, UnitOrder
from fsdpctl.plan.slots import SlotSpec, assign_slots
from fsdpctl.plan.strategy import Strategy
from fsdpctl.plan.units import UnitSpec, divide_into_units
from fsdpctl.shards import FlatShard


@dataclass(frozen=True, slots=True)
class _Builder:
    """What every unit is built with."""

    strategy: Strategy
    precision: Precision
    collectives: Collectives
    device: torch.device
    initialize: Callable[[str, Tensor], None] | None
    params: dict[str, nn.Parameter]
    dtypes: dict[str, torch.dtype]  # of the parameters as the user made them

    def layouts(self, spec: UnitSpec) -> tuple[FlatLayout, ...]:
        return spec.layouts(self.collectives.size)

    def compute_dtype(self, layout: FlatLayout) -> torch.dtype:
        return self.precision.compute_dtype(self.dtypes[layout.params[0].name])

    def nbytes(self, spec: UnitSpec) -> int:
        return sum(each.numel * self.compute_dtype(each).itemsize for each in self.layouts(spec))

    def unit(self, spec: UnitSpec, slot: Slot) -> ShardedUnit:
        buffers, offset = [], 0
        for layout in self.layouts(spec):
            dtype = self.compute_dtype(layout)
            whole = slot.view(offset, layout.numel, dtype)
            offset += whole.nbytes
            buffers.append(self.buffer(spec.name, layout, whole))
        unit = ShardedUnit(spec.name, buffers, slot)
        if self.strategy.keeps_whole_params:
            slot.take(spec.name)
            unit.become_whole()
        else:
            unit.rest()
        return unit

    @torch.no_grad()
    def buffer(self, unit: str, layout: FlatLayout, whole: Tensor) -> UnitBuffer:
        values = self.initial_values(layout)
        everything = Span(0, layout.numel)
        owned = layout.parts[self.collectives.rank]
        held = owned if self.strategy.shards_optimizer else everything
        if self.strategy.keeps_whole_params:
            whole.copy_(values)
            master = whole if whole.dtype == values.dtype else values
        else:
            master = values[held.start : held.stop].clone()
        shard = FlatShard(unit, layout, master, held, owned)
        return UnitBuffer(shard, [self.params[p.name] for p in layout.params], whole)

    def initial_values(self, layout: FlatLayout) -> Tensor:
        """The whole flat buffer in the masters' dtype, the same on every rank."""
        dtype = self.precision.dtype_of_master(self.dtypes[layout.params[0].name])
        flat = torch.zeros(layout.numel, dtype=dtype, device=self.device)
        for placement in layout.placements:
            name, span = placement.param.name, placement.span
            view = flat[span.start : span.stop].view(placement.param.shape)
            if self.initialize is None:
                view.copy_(self.params[name])
            else:
                self.initialize(name, view)
        return self.collectives.broadcast(flat) if self.initialize is None else flat


def build_runtime(
    module: nn.Module,
    strategy: Strategy,
    *,
    classes: Sequence[str] | None,
    prefetch: Prefetch,
    precision: Precision,
    collectives: Collectives,
    source: tuple[torch.device, Callable[[str, Tensor], None] | None],
) -> Runtime:
    """Take over `module`'s parameters and hook its events; `source` says where values come from."""
    device, initialize = source
    specs = divide_module(module, classes)
    _check_same_model(specs, collectives)
    dtypes = {name: param.dtype for name, param in module.named_parameters()}
    if initialize is None and any(param.is_meta for param in module.parameters()):
        raise EngineError("parameters on the meta device have no values: pass initialize=")
    replace_meta_parameters(module, device)
    _move_buffers(module, device, collectives)
    builder = _Builder(
        strategy,
        precision,
        collectives,
        device,
        initialize,
        dict(module.named_parameters()),
        dtypes,
    )
    units = _build_units(specs, builder, prefetch)
    masters = {buffer.shard.master.dtype for unit in units for buffer in unit.buffers}
    runtime = Runtime(
        units,
        _unit_order(module, specs),
        strategy=strategy,
        prefetch=prefetch,
        collectives=collectives,
        reduce_dtypes={dtype: precision.dtype_of_reduction(dtype) for dtype in masters},
    )
    _hook(module, runtime, precision)
    return runtime


def divide_module(module: nn.Module, classes: Sequence[str] | None) -> tuple[UnitSpec, ...]:
    """The units of a module, root first; `classes` None finds the repeated blocks."""
    return divide_into_units(
        describe_module(module),
        classes=classes,
        embedding=name_of_submodule(module, "get_input_embeddings"),
        head=name_of_submodule(module, "get_output_embeddings"),
    )


def _unit_order(module: nn.Module, specs: Sequence[UnitSpec]) -> UnitOrder:
    lookups = frozenset(
        spec.name
        for spec in specs
        if spec.kind == "embedding" and isinstance(module.get_submodule(spec.name), nn.Embedding)
    )
    root, *others = specs
    return UnitOrder(root.name, tuple(spec.name for spec in others), lookups)


def _build_units(
    specs: Sequence[UnitSpec], builder: _Builder, prefetch: Prefetch
) -> list[ShardedUnit]:
    nbytes = {spec.name: builder.nbytes(spec) for spec in specs}
    root, *others = (spec.name for spec in specs)
    slots = _slot_specs(builder.strategy, nbytes, root, others, prefetch.depth)
    slot_of = {unit: number for number, slot in enumerate(slots) for unit in slot.units}
    made: dict[int, Slot] = {}
    units = []
    for spec in specs:  # one after another: a slot that can be freed is, before the next is made
        number = slot_of[spec.name]
        if number not in made:
            resident = slots[number].resident or builder.strategy.keeps_whole_params
            made[number] = Slot(slots[number].nbytes, builder.device, resident=resident)
        units.append(builder.unit(spec, made[number]))
    return units


def _slot_specs(
    strategy: Strategy, nbytes: dict[str, int], root: str, others: list[str], depth: int
) -> tuple[SlotSpec, ...]:
    if strategy.reshard_after_forward:
        return assign_slots(nbytes, root, others, depth)
    return tuple(SlotSpec(nbytes[name], (name,), resident=False) for name in (root, *others))


def _check_same_model(specs: Sequence[UnitSpec], collectives: Collectives) -> None:
    for rank, theirs in enumerate(collectives.gather_objects(tuple(specs))):
        if theirs != tuple(specs):
            raise EngineError(
                f"rank {rank} has another model than rank {collectives.rank}: "
                f"{_first_difference(specs, theirs)}"
            )


def _first_difference(ours: Sequence[UnitSpec], theirs: object) -> str:
    assert isinstance(theirs, tuple)
    for mine, other in zip(ours, theirs, strict=False):
        for param, other_param in zip(mine.params, other.params, strict=False):
            if param != other_param:
                return f"{other_param} there, {param} here"
    return f"{len(theirs)} units there, {len(ours)} here"


@torch.no_grad()
def _move_buffers(module: nn.Module, device: torch.device, collectives: Collectives) -> None:
    for each in module.modules():
        for key, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[key] = collectives.broadcast(buffer.to(device))


def _hook(module: nn.Module, runtime: Runtime, precision: Precision) -> None:
    hook_root(module, runtime, precision.param_dtype)
    for unit in runtime.units.values():
        hook_gradients(runtime, unit)
        if unit is not runtime.root and runtime.strategy.shards_params:
            hook_unit(module.get_submodule(unit.name), runtime, unit)
