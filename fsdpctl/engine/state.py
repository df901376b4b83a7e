"""Whole tensors out of shards."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fsdpctl.comm.mesh import Mesh
from fsdpctl.engine.describe import all_named_parameters
from fsdpctl.shards import FlatShard, persistent_buffers


@torch.no_grad()
def whole_values(shard: FlatShard, values: Tensor, mesh: Mesh) -> Tensor:
    """The whole flat buffer of which `values`, a tensor like the master, is what this rank has."""
    if shard.is_replicated:
        return values
    layout = shard.layout
    whole = values.new_empty(layout.numel)
    if mesh.replicas is None or layout.shares == 1:
        return mesh.shard.all_gather(whole, layout.parts, values).wait()
    own = layout.parts[mesh.shard.rank]
    mesh.replicas.all_gather(whole[own.start : own.stop], layout.shares_of_part, values).wait()
    return mesh.shard.all_gather(whole, layout.parts, None).wait()


@torch.no_grad()
def full_state(module: nn.Module, shards: Sequence[FlatShard], mesh: Mesh) -> dict[str, Tensor]:
    """Every parameter and persistent buffer on the CPU, shared ones under each of their names."""
    whole: dict[str, Tensor] = {}
    for shard in shards:
        flat = whole_values(shard, shard.master, mesh).cpu()
        for placement in shard.layout.placements:
            span = placement.span
            values = flat[span.start : span.stop].view(placement.param.shape)
            whole[placement.param.name] = values.clone()
    first_names = {id(param): name for name, param in module.named_parameters()}
    state = {
        name: whole[first_names[id(param)]] for name, _, _, param in all_named_parameters(module)
    }
    state.update({name: each.cpu().clone() for name, each in persistent_buffers(module).items()})
    return state
