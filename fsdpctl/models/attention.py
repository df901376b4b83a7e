"""Causal attention: over full rows, within a window, and over documents packed into a row."""

import inspect
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fsdpctl.models.attention_kernels import (
    compute_dtype,
    device_type,
    has_varlen_kernel,
    must_repeat_kv,
)
from fsdpctl.models.attention_sinks import cpu_attention_with_sinks, varlen_attention_with_sinks
from fsdpctl.models.context_parallel import heads_to_tokens, repeat_heads, tokens_to_heads
from fsdpctl.models.packed_documents import PackedDocuments
from fsdpctl.plan.batch_plan import ContextParallel


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """The computation of scores, by default products divided by the root of a head's width."""

    scale: float | None = None  # their factor, in place of that
    softcap: float | None = None  # the scores' limit, approached by tanh
    sinks: Tensor | None = None  # (heads,): one more score for each query, of no token
    dropout: float = 0.0

    @property
    def has_kernel(self) -> bool:
        """Whether the kernel for packed sequences computes them."""
        return self.softcap is None and not self.dropout


DEFAULT_SCORES = ScoreOptions()


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """The tokens that each token sees, in the form of the kernel: offsets, bias or documents."""

    window: int | None
    offsets: Tensor | None = None  # int32: where sequences begin in all rows as one, and their end
    longest: int = 0  # at least the tokens of the longest sequence
    bias: Tensor | None = None  # added to scores: 0, or minus infinity for tokens out of sight
    documents: PackedDocuments | None = None
    context: ContextParallel | None = None  # of ranks that share each row


def attention_mask(
    x: Tensor,
    head_dim: int,
    window: int | None,
    documents: PackedDocuments | None,
    scores: ScoreOptions = DEFAULT_SCORES,
) -> AttentionMask | None:
    """Return the mask of a layer; None: full rows, causally.

    `x` is of shape (batch, length, ...), in the compute dtype. `window` are the tokens in sight.
    """
    context = None if documents is None else documents.context
    if documents is not None and documents.one_per_row:
        documents = None
    batch, length = x.shape[0], x.shape[1] * (1 if context is None else context.size)
    mask = _row_mask(x, (batch, length, head_dim), window, documents, scores)
    return mask if context is None else replace(mask or AttentionMask(None), context=context)


def _row_mask(
    x: Tensor,
    sizes: tuple[int, int, int],
    window: int | None,
    documents: PackedDocuments | None,
    scores: ScoreOptions,
) -> AttentionMask | None:
    dtype, (batch, length, head_dim) = compute_dtype(x), sizes
    device = device_type(x) if documents is None else documents.device_type
    as_sequences = scores.has_kernel and has_varlen_kernel(device, dtype, head_dim)
    if documents is None:
        is_full = window is None or length <= window
        if is_full and (scores.sinks is None or not as_sequences):
            return None
        if as_sequences:
            ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=x.device)
            return AttentionMask(window, offsets=ends, longest=length)
        return AttentionMask(window, bias=_as_bias(_window_mask(length, window, x.device), dtype))
    if as_sequences:
        return AttentionMask(window, offsets=documents.offsets, longest=documents.longest)
    if device == "cuda" and scores.has_kernel:
        return AttentionMask(window, bias=_as_bias(documents.mask(window), dtype))
    return AttentionMask(window, documents=documents)


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bias that torch would make of `mask` in each layer, and keep for its backward."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None = None,
    scores: ScoreOptions = DEFAULT_SCORES,
) -> Tensor:
    """Attend to the tokens that `mask` allows: by default each token and those before it.

    Shapes are (batch, heads, length, head_dim); several heads of `q` may share one of `k` and
    `v`.
    """
    if mask is None:
        return _attention(q, k, v, scores=scores)
    if mask.context is None:
        return _attend(q, k, v, mask, scores)
    if scores.sinks is not None:
        own = scores.sinks.chunk(mask.context.size)[mask.context.index]
        scores = ScoreOptions(scores.scale, scores.softcap, own, scores.dropout)
    return heads_to_tokens(
        _attend(*tokens_to_heads(q, k, v, mask.context), mask, scores), mask.context
    )


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scores: ScoreOptions) -> Tensor:
    if mask.offsets is not None:
        return _attend_varlen(q, k, v, mask, scores)
    if mask.bias is not None:
        return _attention(q, k, v, mask=mask.bias, scores=scores)
    if mask.documents is None:
        return _attention(q, k, v, scores=scores)
    if torch.compiler.is_compiling():
        return _attention(q, k, v, mask=mask.documents.mask(mask.window), scores=scores)
    return _attend_per_document(q, k, v, mask.window, mask.documents, scores)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    scores: ScoreOptions = DEFAULT_SCORES,
) -> Tensor:
    if scores.sinks is not None or scores.softcap is not None:
        return _attend_with_matmuls(q, k, v, mask, scores)
    shares = q.shape[1] != k.shape[1]
    if shares and must_repeat_kv(q, masked=mask is not None):
        k, v, shares = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1]), False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=scores.dropout, is_causal=mask is None,
        scale=scores.scale, enable_gqa=shares,
    )  # fmt: skip


def _attend_with_matmuls(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: ScoreOptions
) -> Tensor:
    """Attend causally, or with a mask, with scores that no kernel of torch computes."""
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    if mask is not None and mask.dtype == torch.bool:
        mask = _as_bias(mask, q.dtype)
    is_plain = scores.has_kernel and not torch.compiler.is_compiling()
    if scores.sinks is not None and is_plain and device_type(q) == "cpu":
        return cpu_attention_with_sinks(q, k, v, scores.sinks, mask, scale)
    if mask is None:
        mask = _as_bias(_window_mask(q.shape[2], None, q.device), q.dtype)
    odds = q @ k.transpose(2, 3) * scale
    if scores.softcap is not None:
        odds = torch.tanh(odds / scores.softcap) * scores.softcap
    odds = odds + mask
    if scores.sinks is not None:
        sinks = scores.sinks.view(1, -1, 1, 1).expand(len(q), -1, q.shape[2], 1)
        odds = torch.cat([odds, sinks.to(odds.dtype)], -1)
    odds = torch.softmax(odds, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return F.dropout(odds[..., : k.shape[2]], scores.dropout) @ v


def _attend_per_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    documents: PackedDocuments,
    scores: ScoreOptions,
) -> Tensor:
    """Attend within each document separately: half the time of a mask on the CPU."""

    def parts(x: Tensor) -> list[Tensor]:
        # Split, not sliced: the gradient of each slice would be as large as the full tensor.
        rows = zip(x.split(1), documents.lengths, strict=True)
        return [part for row, lengths in rows for part in row.split(lengths, dim=2)]

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        if window is None or length <= window:
            return _attention(q, k, v, scores=scores)
        return _attention(q, k, v, mask=_window_mask(length, window, q.device), scores=scores)

    mixed = iter([alone(*each) for each in zip(parts(q), parts(k), parts(v), strict=True)])
    return torch.cat([torch.cat([next(mixed) for _ in each], 2) for each in documents.lengths])


def _attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scores: ScoreOptions
) -> Tensor:
    """Attend with all rows as one, by the kernel for sequences of different lengths."""
    from torch.nn.attention.varlen import varlen_attn  # its import takes a third of a second

    batch, heads, length, width = q.shape
    dtype, offsets = compute_dtype(q), mask.offsets
    assert offsets is not None
    shares = k.shape[1] != heads
    if shares and not _varlen_has_gqa():
        k, v, shares = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1]), False

    def flat(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(batch * length, -1, width).to(dtype)

    window = -1 if mask.window is None else mask.window - 1
    if scores.sinks is not None:
        rest = mask.longest, window, scores.scale
        mixed: Any = varlen_attention_with_sinks(
            flat(q), flat(k), flat(v), scores.sinks, offsets, rest
        )
    else:
        call = partial(varlen_attn, max_q=mask.longest, max_k=mask.longest)
        about: dict[str, Any] = {} if scores.scale is None else {"scale": scores.scale}
        mixed = (partial(call, enable_gqa=True) if shares else call)(
            flat(q), flat(k), flat(v), offsets, offsets, window_size=(window, 0), **about
        )
    assert isinstance(mixed, Tensor)
    return mixed.view(batch, length, heads, width).transpose(1, 2)


def import_kernels(device_type: str) -> None:
    """Import what attention over packed sequences needs, which is not possible while tracing."""
    if device_type == "cuda":
        _varlen_has_gqa()  # imports the operators too


@cache
def _varlen_has_gqa() -> bool:
    """Return whether this torch's kernel supports fewer heads of keys and values."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
