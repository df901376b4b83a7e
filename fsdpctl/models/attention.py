"""Causal attention: of whole rows, within a window, and of documents that share a row."""

import inspect
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fsdpctl.models.documents import Documents
from fsdpctl.models.kernels import computed_dtype, must_repeat
from fsdpctl.models.sight import Sight, window_mask


def attend(q: Tensor, k: Tensor, v: Tensor, sight: Sight | None = None) -> Tensor:
    """Mix the values of the tokens that each token sees: by default those before it and itself.

    Shapes are (batch, heads, length, head_dim); several heads of `q` may share one of `k` and
    `v`.
    """
    if sight is None:
        return _attention(q, k, v)
    if sight.offsets is not None:
        return _attend_flat(q, k, v, sight, sight.offsets)
    if sight.bias is not None:
        return _attention(q, k, v, mask=sight.bias)
    assert sight.documents is not None
    if torch.compiler.is_compiling():
        return _attention(q, k, v, mask=sight.documents.mask(sight.window))
    return _attend_each(q, k, v, sight.window, sight.documents)


def attend_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Mix the values of all tokens, for each token of `q`."""
    return _attention(q, k, v, causal=False)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = True
) -> Tensor:
    shares = q.shape[1] != k.shape[1]
    if shares and must_repeat(q, masked=mask is not None):
        k, v, shares = _repeated(k, q), _repeated(v, q), False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=shares
    )


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values for each head of `q`."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    length = q.shape[2]
    if window is None or length <= window:
        return _attention(q, k, v)
    return _attention(q, k, v, mask=window_mask(length, window, q.device))


def _attend_each(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: Documents
) -> Tensor:
    """One after another, each as if it were alone: half the time of a mask on the CPU."""

    def parts(x: Tensor) -> list[Tensor]:
        # Split, not sliced: the gradient of each slice would be as large as the whole.
        rows = zip(x.split(1), documents.lengths, strict=True)
        return [part for row, lengths in rows for part in row.split(lengths, dim=2)]

    alone = zip(parts(q), parts(k), parts(v), strict=True)
    mixed = iter([_attend_rows(q_, k_, v_, window) for q_, k_, v_ in alone])
    return torch.cat([torch.cat([next(mixed) for _ in each], 2) for each in documents.lengths])


def _attend_flat(q: Tensor, k: Tensor, v: Tensor, sight: Sight, offsets: Tensor) -> Tensor:
    """All rows as one, by the kernel for sequences of different lengths."""
    from torch.nn.attention.varlen import varlen_attn  # its import takes a third of a second

    batch, heads, length, width = q.shape
    dtype = computed_dtype(q)
    shares = k.shape[1] != heads
    if shares and not _shares_heads():
        k, v, shares = _repeated(k, q), _repeated(v, q), False

    def flat(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(batch * length, -1, width).to(dtype)

    call = partial(varlen_attn, max_q=sight.longest, max_k=sight.longest)
    mixed = (partial(call, enable_gqa=True) if shares else call)(
        flat(q),
        flat(k),
        flat(v),
        offsets,
        offsets,
        window_size=(-1 if sight.window is None else sight.window - 1, 0),
    )
    assert isinstance(mixed, Tensor)
    return mixed.view(batch, length, heads, width).transpose(1, 2)


def import_kernels(device_type: str) -> None:
    """Import what attention over sequences in a row needs there: that cannot be while watched."""
    if device_type == "cuda":
        _shares_heads()


@cache
def _shares_heads() -> bool:
    """Whether this torch's kernel takes fewer heads of keys and values."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
