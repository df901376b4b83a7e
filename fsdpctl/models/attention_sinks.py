"""Attention with sinks: each head has one more score in its softmax, which belongs to no token.

Note: how a kernel without sinks is used. The kernel returns its result and the log-sum-exp L of the
tokens' scores. With the sink s of a head, tokens have the share exp(L) / (exp(L) + exp(s)) of the
probability, so the result is multiplied by this share. The kernel's backward recomputes
probabilities from a log-sum-exp, which is that of all scores, including the sink. The gradient of s
is minus the sum over queries of the sink's share times the product of result and gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
VarlenOptions = tuple[int, int, float | None]
"""The maximum sequence length, earlier tokens in the window (-1: all), and the scale of scores."""


class _CpuAttention(torch.autograd.Function):
    """Attention in rows of shape (batch, heads, length, head_dim); causal without `bias`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bias: Tensor | None, scale: float
    ) -> Tensor:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, bias is None, attn_mask=bias, scale=scale
        )
        out, total_lse = _add_sinks(out, lse, sinks.view(-1, 1))
        ctx.bias, ctx.scale = bias, scale
        ctx.save_for_backward(q, k, v, sinks, out, total_lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, sinks, out, total_lse = ctx.saved_tensors
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, *inputs, out, total_lse, 0.0, ctx.bias is None, attn_mask=ctx.bias,
            scale=ctx.scale,
        )  # fmt: skip
        sink_gradient = _sink_gradient(gradient, out, total_lse, sinks.view(-1, 1))
        return *gradients, sink_gradient.sum((0, 2)).to(sinks.dtype), None, None


class _VarlenAttention(torch.autograd.Function):
    """Attention on CUDA within sequences of different lengths, in (tokens, heads, head_dim)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        offsets: Tensor,
        options: VarlenOptions,
    ) -> Tensor:
        max_length, window, scale = options
        # torch.nn.attention.varlen defines the operator. A window is causal: no later tokens.
        out, lse, rng_state = torch.ops.torch_attn._varlen_attn(
            q, k, v, offsets, offsets, max_length, max_length, window < 0, scale, [window, 0],
            q.shape[1] != k.shape[1],
        )  # fmt: skip
        out, total_lse = _add_sinks(out, lse.t(), sinks)  # `lse`: (heads, tokens)
        ctx.options = options
        ctx.save_for_backward(q, k, v, sinks, offsets, rng_state, out, total_lse.t().contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, sinks, offsets, rng_state, out, total_lse = ctx.saved_tensors
        max_length, window, scale = ctx.options
        gradients = torch.ops.torch_attn._varlen_attn_backward(
            gradient.contiguous(), *inputs, out, total_lse, offsets, offsets, max_length,
            max_length, window < 0, rng_state, scale, [window, 0],
        )  # fmt: skip
        sink_gradient = _sink_gradient(gradient, out, total_lse.t(), sinks)
        return *gradients, sink_gradient.sum(0).to(sinks.dtype), None, None


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention's result with sinks, and the log-sum-exp of all scores of each query."""
    total_lse = torch.logaddexp(lse, sinks.to(lse.dtype))
    return out * torch.exp(lse - total_lse).unsqueeze(-1).to(out.dtype), total_lse


def _sink_gradient(gradient: Tensor, out: Tensor, total_lse: Tensor, sinks: Tensor) -> Tensor:
    product = (gradient * out).sum(-1, dtype=total_lse.dtype)
    return -torch.exp(sinks.to(total_lse.dtype) - total_lse) * product


cpu_attention_with_sinks: Callable[..., Tensor] = _CpuAttention.apply
"""Attend with a sink for each head, (heads,), on the CPU; see `_CpuAttention`."""
varlen_attention_with_sinks: Callable[..., Tensor] = _VarlenAttention.apply
"""Attend with a sink for each head, (heads,), on CUDA; see `_VarlenAttention`."""
