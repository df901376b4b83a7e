"""Attention whose scores have a sink for each head: one more score, of no token.

Note: a kernel without sinks computes it. With its log-sum-exp L and the sink s of a head, tokens
have the share exp(L) / (exp(L) + exp(s)), by which its result is multiplied. Its backward computes
probabilities from the log-sum-exp that it is given: with that of all scores, they are right. The
gradient of s is minus the sum over queries of its share times the product of result and gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
VarlenOptions = tuple[int, int, float | None]
"""At least the longest length, the earlier tokens in sight (-1: all), and the factor of scores."""


class _CpuAttention(torch.autograd.Function):
    """Attention of rows, (batch, heads, length, width); without `bias`, causal."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bias: Tensor | None, scale: float
    ) -> Tensor:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, bias is None, attn_mask=bias, scale=scale
        )
        out, every = _add_sinks(out, lse, sinks.view(-1, 1))
        ctx.bias, ctx.scale = bias, scale
        ctx.save_for_backward(q, k, v, sinks, out, every)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, sinks, out, every = ctx.saved_tensors
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, *inputs, out, every, 0.0, ctx.bias is None, attn_mask=ctx.bias,
            scale=ctx.scale,
        )  # fmt: skip
        of_rows = _sink_gradient(gradient, out, every, sinks.view(-1, 1))
        return *found, of_rows.sum((0, 2)).to(sinks.dtype), None, None


class _VarlenAttention(torch.autograd.Function):
    """Attention on CUDA within sequences of different lengths, (tokens, heads, width)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        offsets: Tensor,
        about: VarlenOptions,
    ) -> Tensor:
        longest, window, scale = about
        out, lse, state = _varlen("_varlen_attn")(
            q, k, v, offsets, offsets, longest, longest, window < 0, scale, [window, 0],
            q.shape[1] != k.shape[1],
        )  # fmt: skip
        out, every = _add_sinks(out, lse.t(), sinks)
        ctx.about = about
        ctx.save_for_backward(q, k, v, sinks, offsets, state, out, every.t().contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, sinks, offsets, state, out, every = ctx.saved_tensors
        longest, window, scale = ctx.about
        found = _varlen("_varlen_attn_backward")(
            gradient.contiguous(), *inputs, out, every, offsets, offsets, longest, longest,
            window < 0, state, scale, [window, 0],
        )  # fmt: skip
        of_tokens = _sink_gradient(gradient, out, every.t(), sinks)
        return *found, of_tokens.sum(0).to(sinks.dtype), None, None


def _varlen(name: str) -> Any:
    return getattr(torch.ops.torch_attn, name)


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result, and the log-sum-exp of all scores; both have a number for each query."""
    every = torch.logaddexp(lse, sinks.to(lse.dtype))
    return out * torch.exp(lse - every).unsqueeze(-1).to(out.dtype), every


def _sink_gradient(gradient: Tensor, out: Tensor, every: Tensor, sinks: Tensor) -> Tensor:
    product = (gradient * out).sum(-1, dtype=every.dtype)
    return -torch.exp(sinks.to(every.dtype) - every) * product


cpu_attention_with_sinks: Callable[..., Tensor] = _CpuAttention.apply
"""Attend with a sink for each head, (heads,), on the CPU; see `_CpuAttention`."""
varlen_attention_with_sinks: Callable[..., Tensor] = _VarlenAttention.apply
"""Attend with a sink for each head, (heads,), on CUDA; see `_VarlenAttention`."""
