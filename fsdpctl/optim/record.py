"""The step record: one small all-reduce that carries every statistic a step needs.

It sums the squares of the gradient, the target tokens, the loss and the requests of ranks. Each
rank also adds its own loss and gradient norm, which show the rank that failed. The mean over
tokens, clipping and skipping become two scalars that the fused optimizer reads on the device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from fsdpctl.comm.collectives import AsyncHostCopy
from fsdpctl.comm.flat_shard import (
    ShardedModelProtocol,
    gradient_norms,
    require_sharded,
    scale_gradients,
    trainable_shards,
)

EPS = 1e-6  # equals that of torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True, slots=True)
class LocalStepStats:
    """Optional statistics of a rank for the record."""

    flags: Sequence[bool] = ()  # requests of this rank; the same number on every rank
    grad_norm: Tensor | None = None  # norm of this rank's unreduced gradient, if measured
    # Losses and target tokens of each source of a mixture, or named sums of a script's loss and
    # their counts. Shape (2, sources).
    by_source: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SpikeLimits:
    """The values above which a step is skipped."""

    loss: float = math.inf
    grad_norm: float = math.inf


@dataclass(frozen=True, slots=True)
class StepStats:
    """The metrics of a step on the host."""

    loss: float  # mean over all target tokens of the step
    grad_norm: float  # before clipping
    tokens: int
    was_applied: bool  # loss and gradient were finite, and within the limits
    flags: tuple[bool, ...] = ()  # whether any rank has set the flag
    rank_losses: tuple[float, ...] = ()  # mean over the tokens of each rank
    rank_grad_norms: tuple[float, ...] = ()  # norm of each rank's gradient; 0 if not measured
    source_losses: tuple[float | None, ...] = ()  # mean by source; None without tokens


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The record of one step, the same on every rank."""

    grad_scale: Tensor  # float scalar: the optimizer divides gradients by it
    found_inf: Tensor  # float32 scalar: 1 if the step must be skipped
    # loss, grad_norm, tokens, found_inf; flags; losses and norms of ranks; sums, counts of sources
    _stats: AsyncHostCopy
    _num_flags: int
    _num_ranks: int
    _num_sources: int

    def stats(self) -> StepStats:
        """Return the metrics; wait for the device if necessary."""
        values = iter(self._stats.tolist())
        loss, norm, tokens, found_inf = islice(values, 4)
        flags = tuple(count > 0 for count in islice(values, self._num_flags))
        losses, norms = (tuple(islice(values, self._num_ranks)) for _ in range(2))
        sums = list(islice(values, self._num_sources))
        by_source = tuple(a / b if b else None for a, b in zip(sums, values, strict=True))
        was_applied = found_inf == 0
        return StepStats(loss, norm, int(tokens), was_applied, flags, losses, norms, by_source)


def sum_of_squares(model: ShardedModelProtocol) -> Tensor:
    """Return this rank's contribution to the gradient's sum of squares, as a float64 scalar."""
    shards = model.flat_shards()
    grads = [grad for shard in shards if (grad := shard.owned_grad) is not None]
    offloaded = [copied.norm for shard in shards if (copied := shard.offloaded_grad) is not None]
    if not grads and not offloaded:
        device = shards[0].device if shards else None
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack([*(gradient_norms(grads) if grads else ()), *offloaded]).double()
    total = norms.dot(norms)
    num_owners = shards[0].num_owners  # the same for all shards
    return total if num_owners == 1 else total / num_owners


@torch.no_grad()
def clip_grad_norm_(model: ShardedModelProtocol, max_norm: float) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most `max_norm`. Collective.

    Returns:
        The norm before clipping, a float64 scalar, the same on every rank.
    """
    require_sharded(model, "clip_grad_norm_")
    model.sync_gradients()
    norm = model.mesh.world.all_reduce(sum_of_squares(model)).sqrt()
    factor = (norm + EPS).reciprocal_().mul_(max_norm).clamp_(max=1.0)
    scale_gradients(trainable_shards(model), factor)
    return norm


@torch.no_grad()
def record_step(
    model: ShardedModelProtocol,
    *,
    loss_sum: Tensor,
    tokens: Tensor,
    nominal_tokens: int,
    max_grad_norm: float,
    local_stats: LocalStepStats = LocalStepStats(),  # frozen
    limits: SpikeLimits = SpikeLimits(),
) -> StepRecord:
    """Sum the statistics of all ranks, and derive the optimizer's scalars. Collective.

    `loss_sum` and `tokens` are this rank's sums over the target tokens of the step. In backward,
    each rank divided its loss by `nominal_tokens`. A `max_grad_norm` of 0 never clips.
    """
    world = model.mesh.world
    squares = sum_of_squares(model)
    loss_sum, tokens = loss_sum.to(squares), tokens.to(squares)
    num_sources = 0 if local_stats.by_source is None else local_stats.by_source.shape[1]
    sizes = 3, len(local_stats.flags), 2 * world.size, 2 * num_sources
    summed = squares.new_zeros(sum(sizes))
    totals, flags, by_rank, by_source = summed.split(sizes)
    torch.stack([squares, loss_sum, tokens], out=totals)
    for index, flag in enumerate(local_stats.flags):
        if flag:
            flags[index].fill_(1.0)
    by_rank[world.rank].copy_(loss_sum / tokens.clamp(min=1))
    if local_stats.grad_norm is not None:
        by_rank[world.size + world.rank].copy_(local_stats.grad_norm)
    if local_stats.by_source is not None:
        by_source.copy_(local_stats.by_source.flatten())
    world.all_reduce(summed)
    total_squares, total_loss, count = totals.unbind()
    num_tokens = count.clamp(min=1)  # a step without a target has the loss 0, and no gradient
    token_factor = nominal_tokens / num_tokens
    norm, loss = total_squares.sqrt() * token_factor, total_loss / num_tokens
    factor = token_factor
    if max_grad_norm > 0:
        factor = factor * (max_grad_norm / (norm + EPS)).clamp(max=1.0)
    is_skipped = ~torch.isfinite(norm + loss) | (loss > limits.loss) | (norm > limits.grad_norm)
    figures = torch.stack([loss, norm, count, is_skipped.double()])
    arriving = AsyncHostCopy(torch.cat([figures, summed[3:]]))
    return StepRecord(1 / factor, is_skipped.float(), arriving, sizes[1], world.size, num_sources)
