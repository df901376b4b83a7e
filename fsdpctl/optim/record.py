"""The step record: one small all-reduce from which everything about a step follows.

It carries the sum of squares of the gradient, the number of target tokens, the summed loss, and
whether a rank wants to stop. From it come the token mean, clipping and skipping, as two scalars
that the fused optimizer reads on the device.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

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
class StepFigures:
    """What the host gets to know of a step."""

    loss: float  # mean over all target tokens of the step
    grad_norm: float  # before clipping
    tokens: int
    finite: bool  # loss and gradient
    stop_requested: bool


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The record of one step, the same on every rank."""

    grad_scale: Tensor  # float scalar: divide gradients by it
    found_inf: Tensor  # float32 scalar: 1 where the step must be skipped
    _figures: Tensor  # loss, grad_norm, tokens, found_inf, stop; on its way to the host
    _ready: torch.cuda.Event | None

    def figures(self) -> StepFigures:
        """What the host may know; waits for the device if it has to."""
        if self._ready is not None:
            self._ready.synchronize()
        loss, norm, tokens, found_inf, stop = self._figures.tolist()
        return StepFigures(loss, norm, int(tokens), found_inf == 0, stop > 0)


def sum_of_squares(model: Sharded) -> Tensor:
    """Of the whole gradient, as a float64 scalar: this rank's share, which its owners divide."""
    shards = model.flat_shards()
    grads = [grad for shard in shards if (grad := shard.owned_grad) is not None]
    if not grads:
        device = shards[0].master.device if shards else None
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm(grads, 2)).double()
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
    stop: bool = False,
) -> StepRecord:
    """Add up the ranks' shares and derive what the optimizer needs. Collective.

    Args:
        model: the sharded model, with reduced gradients.
        loss_sum: this rank's loss, summed over its target tokens of the step.
        tokens: how many those were.
        nominal_tokens: how many the losses were divided by, in all ranks together.
        max_grad_norm: the norm above which the gradient is scaled down; 0 for never.
        stop: whether this rank was asked to stop.
    """
    share = sum_of_squares(model)
    shares = [share, loss_sum.to(share), tokens.to(share), torch.full_like(share, float(stop))]
    squares, loss, count, stops = model.mesh.world.all_reduce(torch.stack(shares)).unbind()
    token_factor = nominal_tokens / count
    norm = squares.sqrt() * token_factor
    factor = token_factor
    if max_grad_norm > 0:
        factor = factor * (max_grad_norm / (norm + EPS)).clamp(max=1.0)
    found_inf = (~torch.isfinite(norm + loss)).float()
    figures = torch.stack([loss / count, norm, count, found_inf.double(), stops])
    ready = None
    if figures.is_cuda:
        figures = figures.to("cpu", non_blocking=True)
        ready = torch.cuda.current_stream().record_event()
    return StepRecord(1 / factor, found_inf, figures, ready)
