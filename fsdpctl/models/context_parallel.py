"""The all-to-all around attention when several ranks share each row (context parallelism).

Each rank has adjacent tokens of all heads. Before attention, an all-to-all gives each rank all
tokens of adjacent heads, and another all-to-all restores the tokens after attention (Jacobs et al.,
DeepSpeed Ulysses, 2023). So attention gets full rows and works with any kernel and mask.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsdpctl.models.custom_ops import operator
from fsdpctl.plan.batch_plan import ContextParallel, heads_per_rank

Exchange = Callable[[Tensor], Tensor]
"""An all-to-all of a contiguous tensor (ranks, ...), which sends row i to rank i."""

# A registry of the process, since custom operators take no functions. The all-to-all also runs in
# backward and in recomputation. So all ranks that share rows must call attention in the same order;
# otherwise, they exchange tensors of different layers, or wait for one another forever.
_exchanges: dict[int, Exchange] = {}


def use_exchange(exchange: Exchange, exchange_index: int = 0) -> None:
    _exchanges[exchange_index] = exchange


def _all_to_all(x: Tensor, exchange_index: int) -> Tensor:
    return _exchanges[exchange_index](x)


def _all_to_all_shape(x: Tensor, exchange_index: int) -> Tensor:
    return torch.empty_like(x)


# A custom operator: torch.compile does not trace the collective, and estimates know its shape.
ALL_TO_ALL = operator("all_to_all", _all_to_all, _all_to_all_shape, is_product=False)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange_index: int) -> Tensor:
        ctx.exchange_index = exchange_index
        return ALL_TO_ALL(x, exchange_index)  # type: ignore[no-any-return]  # torch is untyped here

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # The all-to-all is a symmetric permutation, so it is its own transpose.
        return ALL_TO_ALL(gradient.contiguous(), ctx.exchange_index), None


def _apply_all_to_all(x: Tensor, context: ContextParallel) -> Tensor:
    return _AllToAll.apply(x.contiguous(), context.exchange_index)  # type: ignore[no-any-return,no-untyped-call]  # torch is untyped here


def tokens_to_heads(
    q: Tensor, k: Tensor, v: Tensor, context: ContextParallel
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all tokens of this rank's heads, (batch, heads / ranks, length, head_dim).

    `q`, `k` and `v` have this rank's tokens, (batch, heads, length / ranks, head_dim). Heads of
    keys and values are repeated unless their number is a multiple of the ranks.
    """
    _, kv_heads = heads_per_rank(q.shape[1], k.shape[1], context.size)
    heads = [q, *(repeat_heads(each, kv_heads * context.size) for each in (k, v))]
    # (ranks, length / ranks, batch, heads / ranks, head_dim)
    by_rank = [each.unflatten(1, (context.size, -1)).permute(1, 3, 0, 2, 4) for each in heads]
    received = _apply_all_to_all(torch.cat([each.flatten(3) for each in by_rank], -1), context)
    widths = [each.shape[3] * each.shape[4] for each in by_rank]
    pairs = zip(received.flatten(0, 1).split(widths, -1), by_rank, strict=True)
    q, k, v = (x.unflatten(-1, y.shape[3:]).permute(1, 2, 0, 3) for x, y in pairs)
    return q, k, v


def heads_to_tokens(output: Tensor, context: ContextParallel) -> Tensor:
    """Return all heads of this rank's tokens, the inverse of `tokens_to_heads`."""
    by_rank = output.unflatten(2, (context.size, -1)).permute(2, 3, 0, 1, 4)
    received = _apply_all_to_all(by_rank, context)  # shape as `by_rank` in `tokens_to_heads`
    return received.permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(1, 2)


def repeat_heads(x: Tensor, count: int) -> Tensor:
    """Repeat each head of keys or values, (batch, heads, ...), to get `count` heads."""
    return x if x.shape[1] == count else x.repeat_interleave(count // x.shape[1], dim=1)
