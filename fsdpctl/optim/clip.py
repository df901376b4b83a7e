"""Clipping by the norm of the whole gradient."""

import torch
from torch import Tensor

from fsdpctl.optim.record import EPS, Replicated, sum_of_squares
from fsdpctl.shards import require_sharded, trainable_shards


@torch.no_grad()
def clip_grad_norm_(model: Replicated, max_norm: float) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most `max_norm`. Collective.

    Returns the norm before, a float64 scalar, the same on every rank.
    """
    require_sharded(model, "clip_grad_norm_")
    model.sync_gradients()
    norm = model.mesh.world.all_reduce(sum_of_squares(model)).sqrt()
    gradients = [shard.grad for shard in trainable_shards(model) if shard.grad is not None]
    factor = (norm + EPS).reciprocal_().mul_(max_norm).clamp_(max=1.0)
    torch._foreach_mul_(gradients, factor)
    return norm
