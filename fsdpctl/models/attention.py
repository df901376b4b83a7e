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
    """The options of attention scores."""

    scale: float | None = None  # factor of q k; None: 1 / sqrt(head_dim)
    softcap: float | None = None  # limit of scores, approached by tanh
    sinks: Tensor | None = None  # (heads,): a score in each softmax that belongs to no token
    dropout: float = 0.0

    @property
    def has_kernel(self) -> bool:
        """Whether the kernel for packed sequences supports the options."""
        return self.softcap is None and not self.dropout


DEFAULT_SCORES = ScoreOptions()


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """The tokens that each token attends to, in the form that a kernel takes.

    At most one of `offsets`, `bias` and `documents` is set. If none is, rows are full and causal.
    """

    window: int | None
    # int32: the begin of each sequence in the concatenated rows, and the end of the last sequence.
    offsets: Tensor | None = None
    max_length: int = 0  # tokens of the longest sequence, or more
    bias: Tensor | None = None  # added to scores: 0, or minus infinity for masked tokens
    documents: PackedDocuments | None = None
    context: ContextParallel | None = None  # the ranks that share each row


def attention_mask(
    x: Tensor,
    head_dim: int,
    window: int | None,
    documents: PackedDocuments | None,
    scores: ScoreOptions = DEFAULT_SCORES,
) -> AttentionMask | None:
    """Return the mask of a layer, or None if rows are full and causal.

    `x` has the shape (batch, length, ...) and the compute dtype. A token attends to at most
    `window` tokens, including itself.
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
    uses_varlen = scores.has_kernel and has_varlen_kernel(device, dtype, head_dim)
    if documents is None:
        is_full = window is None or length <= window
        if is_full and (scores.sinks is None or not uses_varlen):
            return None
        if uses_varlen:
            ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=x.device)
            return AttentionMask(window, offsets=ends, max_length=length)
        return AttentionMask(window, bias=_as_bias(_window_mask(length, window, x.device), dtype))
    if uses_varlen:
        return AttentionMask(window, offsets=documents.offsets, max_length=documents.max_length)
    if device == "cuda" and scores.has_kernel:
        return AttentionMask(window, bias=_as_bias(documents.mask(window), dtype))
    return AttentionMask(window, documents=documents)


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask.triu(1 - window)


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask to a bias once, which torch would do and save in every layer."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None = None,
    scores: ScoreOptions = DEFAULT_SCORES,
) -> Tensor:
    """Attend to the tokens that `mask` allows; None is causal.

    Shapes are (batch, heads, length, head_dim). `q` may have a multiple of the heads of `k` and `v`
    (grouped-query attention).
    """
    if mask is None:
        return _sdpa(q, k, v, scores=scores)
    if mask.context is None:
        return _attend(q, k, v, mask, scores)
    if scores.sinks is not None:
        local_sinks = scores.sinks.chunk(mask.context.size)[mask.context.index]
        scores = ScoreOptions(scores.scale, scores.softcap, local_sinks, scores.dropout)
    return heads_to_tokens(
        _attend(*tokens_to_heads(q, k, v, mask.context), mask, scores), mask.context
    )


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scores: ScoreOptions) -> Tensor:
    if mask.offsets is not None:
        return _attend_varlen(q, k, v, mask, scores)
    if mask.bias is not None:
        return _sdpa(q, k, v, mask=mask.bias, scores=scores)
    if mask.documents is None:
        return _sdpa(q, k, v, scores=scores)
    if torch.compiler.is_compiling():
        return _sdpa(q, k, v, mask=mask.documents.mask(mask.window), scores=scores)
    return _attend_per_document(q, k, v, mask.window, mask.documents, scores)


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    scores: ScoreOptions = DEFAULT_SCORES,
) -> Tensor:
    if scores.sinks is not None or scores.softcap is not None:
        return _attend_with_matmuls(q, k, v, mask, scores)
    is_gqa = q.shape[1] != k.shape[1]
    if is_gqa and must_repeat_kv(q, masked=mask is not None):
        k, v, is_gqa = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1]), False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=scores.dropout, is_causal=mask is None,
        scale=scores.scale, enable_gqa=is_gqa,
    )  # fmt: skip


def _attend_with_matmuls(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: ScoreOptions
) -> Tensor:
    """Attend with matrix products if score options have no kernel in torch; causal without mask."""
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    if mask is not None and mask.dtype == torch.bool:
        mask = _as_bias(mask, q.dtype)
    is_plain = scores.has_kernel and not torch.compiler.is_compiling()
    if scores.sinks is not None and is_plain and device_type(q) == "cpu":
        return cpu_attention_with_sinks(q, k, v, scores.sinks, mask, scale)
    if mask is None:
        mask = _as_bias(_window_mask(q.shape[2], None, q.device), q.dtype)
    weights = q @ k.transpose(2, 3) * scale
    if scores.softcap is not None:
        weights = torch.tanh(weights / scores.softcap) * scores.softcap
    weights = weights + mask
    if scores.sinks is not None:
        sinks = scores.sinks.view(1, -1, 1, 1).expand(len(q), -1, q.shape[2], 1)
        weights = torch.cat([weights, sinks.to(weights.dtype)], -1)
    weights = torch.softmax(weights, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(
        q.dtype
    )
    return F.dropout(weights[..., : k.shape[2]], scores.dropout) @ v


def _attend_per_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    documents: PackedDocuments,
    scores: ScoreOptions,
) -> Tensor:
    """Attend within each document separately. On the CPU, a mask would take twice the time."""

    def split(x: Tensor) -> list[Tensor]:
        # Not slices: autograd would allocate a gradient of the full size for each slice.
        rows = zip(x.split(1), documents.lengths, strict=True)
        return [document for row, lengths in rows for document in row.split(lengths, dim=2)]

    def attend_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        if window is None or length <= window:
            return _sdpa(q, k, v, scores=scores)
        return _sdpa(q, k, v, mask=_window_mask(length, window, q.device), scores=scores)

    outputs = iter([attend_one(*each) for each in zip(*map(split, (q, k, v)), strict=True)])
    return torch.cat([torch.cat([next(outputs) for _ in each], 2) for each in documents.lengths])


def _attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scores: ScoreOptions
) -> Tensor:
    """Attend in the concatenated rows with the kernel for sequences of different lengths."""
    from torch.nn.attention.varlen import varlen_attn  # the import takes a third of a second

    batch, heads, length, head_dim = q.shape
    dtype, offsets = compute_dtype(q), mask.offsets
    assert offsets is not None
    is_gqa = k.shape[1] != heads
    if is_gqa and not _varlen_has_gqa():
        k, v, is_gqa = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1]), False

    def flat(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(batch * length, -1, head_dim).to(dtype)

    window = -1 if mask.window is None else mask.window - 1
    if scores.sinks is not None:
        options = mask.max_length, window, scores.scale
        output: Any = varlen_attention_with_sinks(
            flat(q), flat(k), flat(v), scores.sinks, offsets, options
        )
    else:
        call = partial(varlen_attn, max_q=mask.max_length, max_k=mask.max_length)
        scale_option: dict[str, Any] = {} if scores.scale is None else {"scale": scores.scale}
        output = (partial(call, enable_gqa=True) if is_gqa else call)(
            flat(q), flat(k), flat(v), offsets, offsets, window_size=(window, 0), **scale_option
        )
    assert isinstance(output, Tensor)
    return output.view(batch, length, heads, head_dim).transpose(1, 2)


def import_kernels(device_type: str) -> None:
    """Import the kernel for packed sequences now: Dynamo cannot trace imports."""
    if device_type == "cuda":
        _varlen_has_gqa()


@cache
def _varlen_has_gqa() -> bool:
    """Return whether the kernel of this version of torch supports grouped-query attention."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
