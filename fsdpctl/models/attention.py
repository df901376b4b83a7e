"""Causal attention: over full rows, within a window, and over documents packed into a row."""

import inspect
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fsdpctl.models.attention_kernels import compute_dtype, device_type, has_varlen, must_repeat_kv
from fsdpctl.models.attention_sinks import cpu_attention_with_sinks, varlen_attention_with_sinks
from fsdpctl.models.context_parallel import heads_to_tokens, repeat_heads, tokens_to_heads
from fsdpctl.models.packed_documents import PackedDocuments
from fsdpctl.plan.batch_plan import ContextParallel


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """The options of softmax attention."""

    scale: float | None = None  # factor of q k; None: 1 / sqrt(head_dim)
    softcap: float | None = None  # limit of scores, approached by tanh
    sinks: Tensor | None = None  # (heads,): a score in each softmax that belongs to no token
    dropout: float = 0.0

    @property
    def has_fused_kernel(self) -> bool:
        """Whether fused kernels support the options."""
        return self.softcap is None and not self.dropout


DEFAULT_OPTIONS = ScoreOptions()


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """The tokens that each token attends to, in the form that a kernel takes.

    At most one of `offsets`, `bias` and `documents` is set. If none is, rows are full and causal.
    """

    window: int | None
    # int32: the start of each sequence in the concatenated rows, and the end of the last sequence.
    offsets: Tensor | None = None
    max_length: int = 0  # an upper bound of the sequences' lengths
    bias: Tensor | None = None  # added to scores: 0, or minus infinity for masked tokens
    documents: PackedDocuments | None = None
    context: ContextParallel | None = None  # this rank's part of the rows; None: full rows


def attention_mask(
    x: Tensor,
    head_dim: int,
    window: int | None,
    documents: PackedDocuments | None,
    options: ScoreOptions = DEFAULT_OPTIONS,
) -> AttentionMask | None:
    """Return the mask of a layer, or None if rows are full and causal.

    `x` has the shape (batch, length, ...) and the compute dtype. A token attends to at most
    `window` tokens, including itself.
    """
    context = None if documents is None else documents.context
    if documents is not None and documents.one_per_row:
        documents = None  # padding follows the document, so a causal mask suffices
    batch, length = x.shape[0], x.shape[1] * (1 if context is None else context.size)
    mask = _row_mask(x, (batch, length, head_dim), window, documents, options)
    return mask if context is None else replace(mask or AttentionMask(window=None), context=context)


def _row_mask(
    x: Tensor,
    sizes: tuple[int, int, int],
    window: int | None,
    documents: PackedDocuments | None,
    options: ScoreOptions,
) -> AttentionMask | None:
    dtype, (batch, size, head_dim) = compute_dtype(x), sizes
    device = device_type(x) if documents is None else documents.device_type
    uses_varlen = options.has_fused_kernel and has_varlen(device, dtype, head_dim)
    if documents is None:
        is_full = window is None or size <= window
        # With sinks, full rows need the varlen kernel too.
        if is_full and (options.sinks is None or not uses_varlen):
            return None
        if uses_varlen:
            offsets = torch.arange(0, (batch + 1) * size, size, dtype=torch.int32, device=x.device)
            return AttentionMask(window, offsets=offsets, max_length=size)
        return AttentionMask(window, bias=_as_bias(_window_mask(size, window, x.device), dtype))
    if uses_varlen:
        return AttentionMask(window, offsets=documents.offsets, max_length=documents.max_length)
    # Without a varlen kernel: one kernel with a bias on CUDA, or a loop over documents.
    if device == "cuda" and options.has_fused_kernel:
        return AttentionMask(window, bias=_as_bias(documents.mask(window), dtype))
    return AttentionMask(window, documents=documents)


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask.triu(1 - window)


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask to a bias once; torch would convert and save it in every layer."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None = None,
    options: ScoreOptions = DEFAULT_OPTIONS,
) -> Tensor:
    """Attend to the tokens that `mask` allows; None is causal.

    Shapes are (batch, heads, length, head_dim). `q` may have a multiple of the heads of `k` and `v`
    (grouped-query attention).
    """
    if mask is None:
        return _attend_rows(q, k, v, mask=None, options=options)
    context = mask.context
    if context is None:
        return _attend(q, k, v, mask, options)
    if options.sinks is not None:
        local_sinks = options.sinks.chunk(context.size)[context.index]
        options = ScoreOptions(options.scale, options.softcap, local_sinks, options.dropout)
    return heads_to_tokens(_attend(*tokens_to_heads(q, k, v, context), mask, options), context)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, options: ScoreOptions) -> Tensor:
    if mask.offsets is not None:
        return _attend_varlen(q, k, v, mask, options)
    if mask.documents is None:
        return _attend_rows(q, k, v, mask.bias, options)
    # torch.compile would unroll the loop over documents, and compile again for other lengths.
    if torch.compiler.is_compiling():
        return _attend_rows(q, k, v, mask.documents.mask(mask.window), options)
    return _attend_per_document(q, k, v, mask.window, mask.documents, options)


def _attend_rows(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: ScoreOptions
) -> Tensor:
    """Attend within each row; causal without `mask`."""
    if options.sinks is not None or options.softcap is not None:
        return _attend_with_matmuls(q, k, v, mask, options)
    is_gqa = q.shape[1] != k.shape[1]
    if is_gqa and must_repeat_kv(q, masked=mask is not None):
        k, v, is_gqa = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1]), False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=options.dropout, is_causal=mask is None,
        scale=options.scale, enable_gqa=is_gqa,
    )  # fmt: skip


def _attend_with_matmuls(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: ScoreOptions
) -> Tensor:
    """Attend with sinks or a softcap, which torch's function lacks; causal without `mask`."""
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    if mask is not None and mask.dtype == torch.bool:
        mask = _as_bias(mask, q.dtype)
    on_cpu = device_type(q) == "cpu" and not torch.compiler.is_compiling()
    if on_cpu and options.sinks is not None and options.has_fused_kernel:
        return cpu_attention_with_sinks(q, k, v, options.sinks, mask, scale)
    if mask is None:
        mask = _as_bias(_window_mask(q.shape[2], window=None, device=q.device), q.dtype)
    scores = q @ k.transpose(2, 3) * scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores + mask
    if options.sinks is not None:
        sinks = options.sinks.view(1, -1, 1, 1).expand(len(q), -1, q.shape[2], 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], -1)
    dtype = torch.promote_types(q.dtype, torch.float32)
    weights = torch.softmax(scores, -1, dtype=dtype).to(q.dtype)[..., : k.shape[2]]  # not the sinks
    return F.dropout(weights, options.dropout) @ v


def _attend_per_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    documents: PackedDocuments,
    options: ScoreOptions,
) -> Tensor:
    """Attend within each document separately. On the CPU, a mask would take twice the time."""

    def split(x: Tensor) -> list[Tensor]:
        # Not slices: autograd would allocate a gradient of the full size for each slice.
        rows = zip(x.split(1), documents.lengths, strict=True)
        return [document for row, lengths in rows for document in row.split(lengths, dim=2)]

    def attend_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        size = q.shape[2]
        mask = None if window is None or size <= window else _window_mask(size, window, q.device)
        return _attend_rows(q, k, v, mask, options)

    outputs = iter([attend_one(*each) for each in zip(*map(split, (q, k, v)), strict=True)])
    return torch.cat([torch.cat([next(outputs) for _ in each], 2) for each in documents.lengths])


def _attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, options: ScoreOptions
) -> Tensor:
    """Attend in the concatenated rows with the kernel for sequences of different lengths."""
    from torch.nn.attention.varlen import varlen_attn  # the import takes a third of a second

    batch, heads, length, head_dim = q.shape
    dtype, offsets = compute_dtype(q), mask.offsets
    assert offsets is not None
    kwargs: dict[str, Any] = {} if options.scale is None else {"scale": options.scale}
    if k.shape[1] != heads:
        if _varlen_has_gqa():
            kwargs["enable_gqa"] = True
        else:
            k, v = repeat_heads(k, heads), repeat_heads(v, heads)
    shape = batch * length, -1, head_dim
    q, k, v = [x.transpose(1, 2).reshape(shape).to(dtype) for x in (q, k, v)]
    size, window = mask.max_length, -1 if mask.window is None else mask.window - 1
    output: Any
    if options.sinks is not None:
        varlen_options = size, window, options.scale
        output = varlen_attention_with_sinks(q, k, v, options.sinks, offsets, varlen_options)
    else:
        kwargs["window_size"] = (window, 0)
        output = varlen_attn(q, k, v, offsets, offsets, size, size, **kwargs)
    assert isinstance(output, Tensor)
    return output.view(batch, length, heads, head_dim).transpose(1, 2)


def import_kernels(device_type: str) -> None:
    """Import the kernel for packed sequences now: Dynamo cannot trace imports."""
    if device_type == "cuda":
        _varlen_has_gqa()  # imports the kernel, and caches its answer


@cache
def _varlen_has_gqa() -> bool:
    """Return whether the kernel of this version of torch supports grouped-query attention."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
