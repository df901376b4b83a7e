"""Reading and writing full parameters of a sharded model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsdpctl.comm.collectives import AllGatherInput
from fsdpctl.comm.flat_shard import FlatShard, persistent_buffers
from fsdpctl.comm.mesh import Mesh
from fsdpctl.engine.parameters import unmark_sharded
from fsdpctl.engine.runtime import Runtime
from fsdpctl.errors import EngineError, did_you_mean
from fsdpctl.models.module_spec import all_named_parameters


@torch.no_grad()
def _full_values(shard: FlatShard, mesh: Mesh) -> Tensor:
    """Return the full masters: replicated masters themselves, or else a new tensor. Collective."""
    master = shard.weights()
    if shard.stores_all:
        return master
    layout = shard.layout
    full = torch.empty(layout.numel, dtype=master.dtype, device=shard.device)
    if mesh.replicas is None or layout.shares_per_shard == 1:
        return mesh.shard.all_gather([AllGatherInput(full, layout.shard_spans, master)]).wait()
    span = layout.shard_spans[mesh.shard.rank]
    shard_input = AllGatherInput(full[span.start : span.stop], layout.share_spans, master)
    mesh.replicas.all_gather([shard_input]).wait()
    return mesh.shard.all_gather([AllGatherInput(full, layout.shard_spans)]).wait()


@torch.no_grad()
def full_state(module: nn.Module, shards: Sequence[FlatShard], mesh: Mesh) -> dict[str, Tensor]:
    """Return all parameters and persistent buffers on the CPU, shared ones under all names."""
    full: dict[str, Tensor] = {}
    for shard in shards:
        flat = _full_values(shard, mesh).cpu()
        for param_span in shard.layout.param_spans:
            span = param_span.span
            values = flat[span.start : span.stop].view(param_span.param.shape)
            full[param_span.param.name] = values.clone()
    first_names = {id(param): name for name, param in module.named_parameters()}
    all_params = all_named_parameters(module)
    state = {name: full[first_names[id(param)]] for name, _, _, param in all_params}
    state.update({name: each.cpu().clone() for name, each in persistent_buffers(module).items()})
    return state


@contextmanager
@torch.no_grad()
def full_parameters(runtime: Runtime, *, writeback: bool) -> Iterator[None]:
    """Give the parameters their full master weights within a `with` block. Collective."""
    runtime.free_all()
    runtime.param_sync.finish()
    full_buffers = []
    for buffer in runtime.buffers:
        full = _full_values(buffer.shard, runtime.mesh).clone()
        for param, view in zip(buffer.params, buffer.param_views(full), strict=True):
            param.data = view
            param._is_exposed = True  # type: ignore[attr-defined]  # of sharded parameters
        full_buffers.append((buffer, full))
    try:
        yield
        if writeback:
            for buffer, full in full_buffers:
                runtime.mesh.world.broadcast(full)
                span = buffer.shard.span
                buffer.shard.write_span(span, full[span.start : span.stop])
            runtime.sync_params()
    finally:
        for unit in runtime.units.values():
            for buffer in unit.buffers:
                for param in buffer.params:
                    param._is_exposed = False  # type: ignore[attr-defined]
                if unit.is_unsharded:
                    buffer.use_unsharded()
                else:
                    buffer.use_sharded()


@torch.no_grad()
def load_full_state(module: nn.Module, runtime: Runtime, state: Mapping[str, Any]) -> None:
    """Load every parameter and persistent buffer from `state`, full tensors by name."""
    first_names = {id(param): name for name, param in module.named_parameters()}
    names = {name: first_names[id(p)] for name, _, _, p in all_named_parameters(module)}
    buffers = persistent_buffers(module)
    for name in state:
        if name not in names and name not in buffers:
            raise EngineError(f"load_state_dict: unknown {name}{did_you_mean(name, names)}")
    values = {names[name]: value for name, value in state.items() if name in names}
    shards = [buffer.shard for buffer in runtime.buffers]
    # All tensors are checked before the first write, so that an error leaves the model unchanged.
    params = (param for shard in shards for param in shard.layout.params)
    full = {each.name: _get_tensor(values, each.name, each.shape) for each in params}
    sources = {name: _get_tensor(state, name, tuple(each.shape)) for name, each in buffers.items()}
    runtime.mesh.shard.wait_for_readers()
    for shard in shards:
        for param_slice in shard.param_slices():
            span = param_slice.in_param
            shard_values = full[param_slice.param.name].reshape(-1)[span.start : span.stop]
            shard.write_span(param_slice.in_flat, shard_values)
    for name, target in buffers.items():
        target.copy_(sources[name])
    runtime.sync_params()


def _get_tensor(state: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in state:
        raise EngineError(f"load_state_dict: {name} is missing")
    value = state[name]
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise EngineError(f"load_state_dict: {name}: expected shape {list(shape)}, got {got}")
    return value


@torch.no_grad()
def update_shards(runtime: Runtime, flat: Tensor) -> None:
    """Overwrite this rank's masters, concatenated in the order of the units."""
    shards = [buffer.shard for buffer in runtime.buffers]
    sizes = [shard.span.numel for shard in shards]
    numel = sum(sizes)
    if not isinstance(flat, Tensor):
        raise EngineError(f"update_shards: expected a 1-D tensor, got a {type(flat).__name__}")
    if flat.ndim != 1 or flat.numel() != numel:
        expected = f"expected a tensor of shape [{numel}], as this rank's shards have"
        raise EngineError(f"update_shards: {expected}, got {list(flat.shape)}")
    runtime.mesh.shard.wait_for_readers()
    for shard, part in zip(shards, flat.split(sizes), strict=True):
        shard.write_span(shard.span, part)
    runtime.sync_params()


def unwrap(module: nn.Module, runtime: Runtime) -> nn.Module:
    """Return the plain module with full parameters of its own; this ends sharding. Collective."""
    with full_parameters(runtime, writeback=False):
        values = {name: param.detach().clone() for name, param in module.named_parameters()}
    for handle in runtime.hooks:
        handle.remove()
    del module._apply
    for name, param in module.named_parameters():
        unmark_sharded(param)
        param.data = values[name]
        param.grad = None
    return module
