"""A linear layer with dropout of its inputs, which saves a seed and the inputs before dropout.

Backward draws the mask again from the seed. So layers with the same input save one tensor, which
they share. The seed comes from torch's CPU generator, whose state recomputation restores.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fsdpctl.models.custom_ops import operator


def _mask(x: Tensor, seed: Tensor, dropout: float) -> Tensor:
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    if mask.is_meta:
        return mask.bernoulli_(1 - dropout)
    generator = torch.Generator(mask.device).manual_seed(int(seed))
    return mask.bernoulli_(1 - dropout, generator=generator)


def _forward(x: Tensor, weight: Tensor, seed: Tensor, dropout: float) -> Tensor:
    return F.linear(x * _mask(x, seed, dropout), weight).div_(1 - dropout)


def _backward(
    gradient: Tensor, x: Tensor, weight: Tensor, seed: Tensor, dropout: float, needs_x: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of `weight`, and of `x` if `needs_x` or else an empty tensor."""
    mask, gradient = _mask(x, seed, dropout), gradient / (1 - dropout)
    dropped, rows = (x * mask).view(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    weight_gradient = rows.t().mm(dropped)
    return weight_gradient, gradient.matmul(weight).mul_(mask) if needs_x else x.new_empty(0)


def _forward_shape(x: Tensor, weight: Tensor, seed: Tensor, dropout: float) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def _backward_shape(
    gradient: Tensor, x: Tensor, weight: Tensor, seed: Tensor, dropout: float, needs_x: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weight), x.new_empty(x.shape if needs_x else 0)


# Without custom operators, torch.compile would find that forward and backward draw the same mask,
# and would save the inputs after dropout until backward.
_FORWARD = operator("dropped_linear", _forward, _forward_shape)
_BACKWARD = operator("dropped_linear_backward", _backward, _backward_shape)


class _DropoutLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seed: Tensor, dropout: float) -> Tensor:
        ctx.save_for_backward(x, weight, seed)
        ctx.dropout = dropout
        return _FORWARD(x, weight, seed, dropout)  # type: ignore[no-any-return]  # torch is untyped here

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        needs_x = ctx.needs_input_grad[0]
        weight_gradient, x_gradient = _BACKWARD(gradient, *ctx.saved_tensors, ctx.dropout, needs_x)
        return x_gradient if needs_x else None, weight_gradient, None, None


def dropout_linear(x: Tensor, weight: Tensor, dropout: float) -> Tensor:
    """Apply dropout to `x`, (..., in), and multiply by `weight`; return shape (..., out)."""
    seed = torch.empty((), dtype=torch.int64, device="cpu").random_()
    return _DropoutLinear.apply(x, weight, seed, dropout)  # type: ignore[no-any-return,no-untyped-call]  # torch is untyped here
