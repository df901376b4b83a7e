"""The step record: one small all-reduce from which everything about a step follows.

It carries the sum of squares of the gradient, the number of target tokens, the summed loss, what
ranks ask for, and each rank's own loss and gradient, by which one that went wrong is found. From it
come the token mean, clipping and skipping, as two scalars that the fused optimizer reads on the
device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fsdpctl.comm.arriving import Arriving
from fsdpctl.comm.mesh import Mesh
from fsdpctl.shards import Sharded

EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class Replicated(Sharded, Protocol):
    """What a record needs of a sharded model."""

    @property
    def mesh(self) -> Mesh:
        """Its ranks."""
        ...


@dataclass(frozen=True, slots=True)
class OwnWord:
    """What a rank says of itself, beside its share of the sums."""

    flags: Sequence[bool] = ()  # what it asks for: as many on every rank
    grad_norm: Tensor | None = None  # of its own gradient, wherever that is looked at


@dataclass(frozen=True, slots=True)
class Limits:
    """Above them a step is not applied."""

    loss: float = math.inf
    grad_norm: float = math.inf


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What the host gets to know of a step."""

    loss: float  # mean over all target tokens of the step
    grad_norm: float  # before clipping
    tokens: int
    was_applied: bool  # loss and gradient were finite, and within the limits
    flags: tuple[bool, ...] = ()  # those that any rank has raised
    rank_losses: tuple[float, ...] = ()  # the mean of each rank's own tokens
    rank_grad_norms: tuple[float, ...] = ()  # as each rank said; 0 where it did not


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The record of one step, the same on every rank."""

    grad_scale: Tensor  # float scalar: divide gradients by it
    found_inf: Tensor  # float32 scalar: 1 where the step must be skipped
    _figures: Arriving  # loss, grad_norm, tokens, found_inf; then flags, and the ranks' own
    _num_ranks: int

    def figures(self) -> StepFigures:
        """What the host may know; waits for the device if it has to."""
        loss, norm, tokens, found_inf, *rest = self._figures.tolist()
        num_flags = len(rest) - 2 * self._num_ranks
        flags, own = rest[:num_flags], rest[num_flags:]
        return StepFigures(
            loss,
            norm,
            int(tokens),
            found_inf == 0,
            tuple(count > 0 for count in flags),
            tuple(own[: self._num_ranks]),
            tuple(own[self._num_ranks :]),
        )


def sum_of_squares(model: Sharded) -> Tensor:
    """Of the whole gradient, as a float64 scalar: this rank's share, which its owners divide."""
    shards = model.flat_shards()
    grads = [grad for shard in shards if (grad := shard.owned_grad) is not None]
    if not grads:
        device = shards[0].master.device if shards else None
        return torch.zeros((), dtype=torch.float64, device=device)
    # In bf16 a norm would have 8 bits, and decide on clipping with them.
    dtype = torch.promote_types(grads[0].dtype, torch.float32)
    norms = torch.stack(torch._foreach_norm(grads, 2, dtype=dtype)).double()
    total = norms.dot(norms)
    owners = shards[0].num_owners  # of all the same
    return total if owners == 1 else total / owners


@torch.no_grad()
def record_step(
    model: Replicated,
    *,
    loss_sum: Tensor,
    tokens: Tensor,
    nominal_tokens: int,
    max_grad_norm: float,
    own: OwnWord = OwnWord(),  # frozen
    limits: Limits = Limits(),
) -> StepRecord:
    """Add up the ranks' shares and derive what the optimizer needs. Collective.

    Args:
        model: the sharded model, with reduced gradients.
        loss_sum: this rank's loss, summed over its target tokens of the step.
        tokens: how many those were.
        nominal_tokens: how many the losses were divided by, in all ranks together.
        max_grad_norm: the norm above which the gradient is scaled down; 0 for never.
        own: what else this rank says.
        limits: of loss and norm, alike on every rank, beyond which the step must be skipped.
    """
    world = model.mesh.world
    share = sum_of_squares(model)
    loss_sum, tokens = loss_sum.to(share), tokens.to(share)
    summed = share.new_zeros(3 + len(own.flags) + 2 * world.size)
    torch.stack([share, loss_sum, tokens], out=summed[:3])
    for place, flag in enumerate(own.flags, start=3):
        if flag:
            summed[place].fill_(1.0)
    ranks = summed[3 + len(own.flags) :].view(2, world.size)
    ranks[0, world.rank].copy_(loss_sum / tokens.clamp(min=1))
    if own.grad_norm is not None:
        ranks[1, world.rank].copy_(own.grad_norm)
    world.all_reduce(summed)
    squares, loss, count = summed[:3].unbind()
    token_factor = nominal_tokens / count
    norm, loss = squares.sqrt() * token_factor, loss / count
    factor = token_factor
    if max_grad_norm > 0:
        factor = factor * (max_grad_norm / (norm + EPS)).clamp(max=1.0)
    is_bad = ~torch.isfinite(norm + loss) | (loss > limits.loss) | (norm > limits.grad_norm)
    figures = torch.stack([loss, norm, count, is_bad.double()])
    arriving = Arriving(torch.cat([figures, summed[3:]]))
    return StepRecord(1 / factor, is_bad.float(), arriving, world.size)
