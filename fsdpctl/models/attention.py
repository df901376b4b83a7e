"""Causal attention: of whole rows, within a window, and of documents that share a row."""

import inspect
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fsdpctl.models.documents import Documents

_FLASH_DTYPES = (torch.bfloat16, torch.float16)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """What each token makes of those before it and itself, `window` of them at most.

    Shapes are (batch, heads, length, head_dim); several heads of `q` may share one of `k` and
    `v`. With `documents` a token sees those of its own alone.
    """
    if documents is None:
        return _attend_rows(q, k, v, window)
    if documents.device_type == "cuda" and q.dtype in _FLASH_DTYPES:
        return _attend_flat(q, k, v, window, documents)
    if documents.device_type == "cpu" and not torch.compiler.is_compiling():
        return _attend_each(q, k, v, window, documents)
    return _attention(q, k, v, mask=documents.mask(window))


def attend_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What one token makes of all that it is shown."""
    return _attention(q, k, v, causal=False)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = True
) -> Tensor:
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal and mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    length = q.shape[2]
    if window is None or length <= window:
        return _attention(q, k, v)
    everything = torch.ones(length, length, dtype=torch.bool, device=q.device)
    return _attention(q, k, v, mask=everything.tril().triu(1 - window))


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


def _attend_flat(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: Documents
) -> Tensor:
    """All rows as one, by the kernel for documents of different lengths."""
    from torch.nn.attention.varlen import varlen_attn  # its import takes a third of a second

    batch, heads, length, width = q.shape
    shares = k.shape[1] != heads
    if shares and not _shares_heads():
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        shares = False

    def flat(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(batch * length, -1, width)

    call = partial(varlen_attn, max_q=documents.longest, max_k=documents.longest)
    mixed = (partial(call, enable_gqa=True) if shares else call)(
        flat(q),
        flat(k),
        flat(v),
        documents.offsets,
        documents.offsets,
        window_size=(-1 if window is None else window - 1, 0),
    )
    assert isinstance(mixed, Tensor)
    return mixed.view(batch, length, heads, width).transpose(1, 2)


def import_kernels(device_type: str) -> None:
    """What attention within documents needs there is imported, as that cannot be while watched."""
    if device_type == "cuda":
        _shares_heads()


@cache
def _shares_heads() -> bool:
    """Whether this torch's kernel takes fewer heads of keys and values."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
