"""Which tokens each token sees, told once per forward to all layers that are alike."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdpctl.models.documents import Documents
from fsdpctl.models.kernels import computed_dtype, device_type, takes_sequences


@dataclass(frozen=True, slots=True)
class Sight:
    """The form that the kernel takes: sequences in a row, or a bias; else documents apart."""

    window: int | None
    offsets: Tensor | None = None  # int32: where sequences begin when all rows are one, and the end
    longest: int = 0  # tokens of a sequence, or some more
    bias: Tensor | None = None  # added to scores: 0, or minus infinity for tokens out of sight
    documents: Documents | None = None


def sights(
    x: Tensor, head_dim: int, windows: Sequence[int | None], documents: Documents | None
) -> list[Sight | None]:
    """Return what each layer of a forward sees by its window; None: whole rows, causally.

    Args:
        x: shape (batch, length, ...), in the dtype that is computed in.
        head_dim: width of a head.
        windows: one per layer, None for all tokens before.
        documents: those that share rows.
    """
    made = {window: sight(x, head_dim, window, documents) for window in set(windows)}
    return [made[window] for window in windows]


def sight(
    x: Tensor, head_dim: int, window: int | None, documents: Documents | None
) -> Sight | None:
    """Return what a layer with this window sees; as `sights`."""
    dtype = computed_dtype(x)
    if documents is None:
        return _of_rows(x, head_dim, window, dtype)
    device = documents.device_type
    if takes_sequences(device, dtype, head_dim):
        return Sight(window, offsets=documents.offsets, longest=documents.longest)
    if device == "cuda":
        return Sight(window, bias=as_bias(documents.mask(window), dtype))
    return Sight(window, documents=documents)


def _of_rows(x: Tensor, head_dim: int, window: int | None, dtype: torch.dtype) -> Sight | None:
    batch, length = x.shape[:2]
    if window is None or length <= window:
        return None
    if takes_sequences(device_type(x), dtype, head_dim):
        ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=x.device)
        return Sight(window, offsets=ends, longest=length)
    return Sight(window, bias=as_bias(window_mask(length, window, x.device), dtype))


def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """(length, length): whether a token is seen from another."""
    everything = torch.ones(length, length, dtype=torch.bool, device=device)
    return everything.tril().triu(1 - window)


def as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what torch would make of `mask` again in each layer, and keep for its backward."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))
