"""A product of inputs with dropout, of which backward keeps a seed instead of the dropped inputs.

The mask is drawn again in backward from the same seed, so that the layers that read one input share
it. The seed comes from torch's generator of the CPU, which checkpointing restores.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Operators of their own: torch.compile would else find that forward and backward draw the same
# mask, and keep the dropped inputs in between.


def _dropped(x: Tensor, seed: Tensor, dropout: float) -> Tensor:
    """Return `x` with zeros at a share of `dropout`; other values are not scaled."""
    mask = torch.empty_like(x, memory_format=torch.contiguous_format)
    if mask.device.type == "meta":
        return mask.bernoulli_(1 - dropout).mul_(x)
    generator = torch.Generator(mask.device).manual_seed(int(seed))
    return mask.bernoulli_(1 - dropout, generator=generator).mul_(x)


def _linear(x: Tensor, weight: Tensor, seed: Tensor, dropout: float) -> Tensor:
    return F.linear(_dropped(x, seed, dropout), weight).div_(1 - dropout)


def _weight_gradient(gradient: Tensor, x: Tensor, seed: Tensor, dropout: float) -> Tensor:
    dropped = _dropped(x, seed, dropout)
    return gradient.flatten(0, -2).t().mm(dropped.flatten(0, -2)).div_(1 - dropout)


def _input_gradient(gradient: Tensor, weight: Tensor, seed: Tensor, dropout: float) -> Tensor:
    return _dropped(gradient.matmul(weight), seed, dropout).div_(1 - dropout)


_LIBRARY = torch.library.Library("fsdpctl", "FRAGMENT")
_ABOUT = "Tensor seed, float dropout) -> Tensor"


def _define(
    name: str, given: str, function: Callable[..., Tensor], like: Callable[..., Tensor]
) -> Any:
    _LIBRARY.define(f"{name}({given}, {_ABOUT}")
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fsdpctl::{name}", like, lib=_LIBRARY)
    return getattr(torch.ops.fsdpctl, name).default


_FORWARD = _define(
    "dropped_linear", "Tensor x, Tensor weight", _linear,
    lambda x, weight, *_: x.new_empty(*x.shape[:-1], len(weight)),
)  # fmt: skip
_OF_WEIGHT = _define(
    "dropped_linear_weight", "Tensor gradient, Tensor x", _weight_gradient,
    lambda gradient, x, *_: x.new_empty(gradient.shape[-1], x.shape[-1]),
)  # fmt: skip
_OF_INPUT = _define(
    "dropped_linear_input", "Tensor gradient, Tensor weight", _input_gradient,
    lambda gradient, weight, *_: gradient.new_empty(*gradient.shape[:-1], weight.shape[-1]),
)  # fmt: skip
OPERATORS: dict[Any, Callable[..., Tensor]] = {
    _FORWARD: _linear, _OF_WEIGHT: _weight_gradient, _OF_INPUT: _input_gradient
}  # fmt: skip
"""The functions that compute the operators."""


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seed: Tensor, dropout: float) -> Tensor:
        ctx.save_for_backward(x, weight, seed)
        ctx.dropout = dropout
        out: Tensor = _FORWARD(x, weight, seed, dropout)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, seed = ctx.saved_tensors
        of_x, of_weight, *_ = ctx.needs_input_grad
        return (
            _OF_INPUT(gradient, weight, seed, ctx.dropout) if of_x else None,
            _OF_WEIGHT(gradient, x, seed, ctx.dropout) if of_weight else None,
            None,
            None,
        )


def dropped_linear(x: Tensor, weight: Tensor, dropout: float) -> Tensor:
    """Return `weight` times dropout of `x`, of shape (..., out), for `x` of shape (..., in)."""
    seed = torch.empty((), dtype=torch.int64, device="cpu").random_()
    out: Tensor = _Product.apply(x, weight, seed, dropout)  # type: ignore[no-untyped-call]  # torch's
    return out
