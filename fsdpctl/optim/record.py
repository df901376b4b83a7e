"""The step record: one small all-reduce that carries every statistic a step needs.

It sums the squares of the gradient, the target tokens, the loss and the requests of ranks. Each
rank also adds its own loss and gradient norm, which show the rank that failed. The mean over
tokens, clipping and skipping become two scalars that the fused optimizer reads on the device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
    """A rank's additions to the record, apart from the sums of gradient, loss and tokens."""

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
    _stats: AsyncHostCopy  # loss, grad_norm, tokens, found_inf; flags; the ranks' own values
    _num_ranks: int
    _num_sources: int = 0

    def stats(self) -> StepStats:
        """Return the metrics; wait for the device if necessary."""
        loss, norm, tokens, found_inf, *rest = self._stats.tolist()
        num_flags = len(rest) - 2 * (self._num_ranks + self._num_sources)
        flags, by_rank = rest[:num_flags], rest[num_flags : num_flags + 2 * self._num_ranks]
        sources = rest[num_flags + 2 * self._num_ranks :]
        sums, counts = sources[: self._num_sources], sources[self._num_sources :]
        of_ranks = tuple(by_rank[: self._num_ranks]), tuple(by_rank[self._num_ranks :])
        by_source = tuple(a / b if b else None for a, b in zip(sums, counts, strict=True))
        any_rank = tuple(count > 0 for count in flags)
        return StepStats(loss, norm, int(tokens), found_inf == 0, any_rank, *of_ranks, by_source)


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
    owners = shards[0].num_owners  # the same for all shards
    return total if owners == 1 else total / owners


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
    summed = squares.new_zeros(3 + len(local_stats.flags) + 2 * (world.size + num_sources))
    torch.stack([squares, loss_sum, tokens], out=summed[:3])
    for index, flag in enumerate(local_stats.flags, start=3):
        if flag:
            summed[index].fill_(1.0)
    offset = 3 + len(local_stats.flags)
    ranks = summed[offset : offset + 2 * world.size].view(2, world.size)
    ranks[0, world.rank].copy_(loss_sum / tokens.clamp(min=1))
    if local_stats.grad_norm is not None:
        ranks[1, world.rank].copy_(local_stats.grad_norm)
    if local_stats.by_source is not None:
        summed[offset + 2 * world.size :].copy_(local_stats.by_source.flatten())
    world.all_reduce(summed)
    squares, loss, count = summed[:3].unbind()
    num_tokens = count.clamp(min=1)  # a step without a target has the loss 0, and no gradient
    token_factor = nominal_tokens / num_tokens
    norm, loss = squares.sqrt() * token_factor, loss / num_tokens
    factor = token_factor
    if max_grad_norm > 0:
        factor = factor * (max_grad_norm / (norm + EPS)).clamp(max=1.0)
    is_bad = ~torch.isfinite(norm + loss) | (loss > limits.loss) | (norm > limits.grad_norm)
    figures = torch.stack([loss, norm, count, is_bad.double()])
    arriving = AsyncHostCopy(torch.cat([figures, summed[3:]]))
    return StepRecord(1 / factor, is_bad.float(), arriving, world.size, num_sources)
