"""Documents that are packed into rows of tokens, and that do not attend to one another."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from fsdpctl.plan.batch_plan import ContextParallel

ASSUMED_TOKENS = 256  # length of a document if it is unknown
Lengths = tuple[tuple[int, ...], ...]  # lengths of the documents in each row of a batch


@dataclass(frozen=True, slots=True)
class PackedDocuments:
    """The documents of a batch. All tensors are on the device."""

    lengths: Lengths
    positions: Tensor  # (batch, length) int64: position of each token in its document
    # int32: the start of each document in the concatenated rows, then the end, repeated so that the
    # number of documents is a power of two. So there are few sizes, and few recompilations.
    offsets: Tensor
    max_length: int  # longest document, rounded up to a power of two or a full row
    device_type: str  # kernels of this device type are used
    context: ContextParallel | None = None  # this rank's part of the rows; None: full rows
    one_per_row: bool = False  # every row has one document, then padding
    # (batch, 1): the position at which padding begins in each row; None: no padding
    padding_starts: Tensor | None = None

    @property
    def local_positions(self) -> Tensor:
        return self.local_part(self.positions)

    @property
    def local_data_mask(self) -> Tensor:
        """(batch, length): whether each of this rank's tokens is data, not padding."""
        ends = self.positions.shape[1] if self.padding_starts is None else self.padding_starts
        return self.local_part((self._row_positions < ends).expand_as(self.positions))

    def local_part(self, rows: Tensor) -> Tensor:
        """Return this rank's part of a tensor of full rows, (batch, length)."""
        if self.context is None:
            return rows
        length = rows.shape[1] // self.context.size
        return rows.narrow(1, self.context.index * length, length)

    @property
    def document_starts(self) -> Tensor:
        """(batch, length, 1): where each token's document begins in its row."""
        return (self._row_positions - self.positions).unsqueeze(-1)

    @property
    def _row_positions(self) -> Tensor:
        return torch.arange(self.positions.shape[1], device=self.positions.device)

    def mask(self, window: int | None) -> Tensor:
        """Return (batch, 1, length, length): whether a token attends to another one.

        A token attends to at most `window` tokens of its document, including itself.
        """
        positions = self._row_positions
        visible = (positions <= positions.unsqueeze(-1)) & (positions >= self.document_starts)
        if window is not None:
            visible = visible & (positions > positions.unsqueeze(-1) - window)
        return visible.unsqueeze(1)


def pack_documents(
    lengths: Lengths,
    device: torch.device,
    *,
    kernel_device: str = "",
    context: ContextParallel | None = None,
    one_per_row: bool = False,
    padding_starts: Sequence[int] = (),
) -> PackedDocuments:
    """Return the documents of a batch, whose rows have equal sums of `lengths`.

    `kernel_device` is the device type whose kernels are used, by default that of `device`. For
    the other arguments, see `PackedDocuments`. Without `padding_starts`, there is no padding.
    """
    rows, size = len(lengths), sum(lengths[0])
    flat = list(chain.from_iterable(lengths))
    positions = torch.cat([torch.arange(length) for length in flat]).view(rows, size)
    offsets = torch.full((_power_of_two(len(flat)) + 1,), rows * size, dtype=torch.int32)
    offsets[: len(flat) + 1] = torch.tensor([0, *accumulate(flat)], dtype=torch.int32)
    max_length = min(size, _power_of_two(max(flat)))
    tensors = copy_to_device(positions, device), copy_to_device(offsets, device)
    starts = torch.tensor(padding_starts).view(-1, 1)
    starts_on_device = copy_to_device(starts, device) if padding_starts else None
    kernel_device = kernel_device or device.type
    return PackedDocuments(
        lengths, *tensors, max_length, kernel_device, context, one_per_row, starts_on_device
    )


def _power_of_two(minimum: int) -> int:
    return 1 << (minimum - 1).bit_length()


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy without waiting for the device. torch keeps the pinned memory until the copy ends."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def assumed_documents(
    rows: int,
    length: int,
    device_type: str,
    *,
    context: ContextParallel | None = None,
    one_per_row: bool = False,
) -> PackedDocuments:
    """Return assumed documents for an estimate: their tensors have shapes but no values."""
    per_row = 1 if one_per_row else max(2, length // ASSUMED_TOKENS)
    # Two lengths suffice for code that loops over documents; `offsets` have the assumed number.
    row = (length - length // 2, length // 2) if length > 1 and not one_per_row else (length,)
    lengths = (row,) * rows
    positions = torch.empty(rows, length, dtype=torch.int64)
    offsets = torch.empty(_power_of_two(rows * per_row) + 1, dtype=torch.int32)
    padding_starts = torch.empty(rows, 1, dtype=torch.int64)
    return PackedDocuments(
        lengths, positions, offsets, length, device_type, context, one_per_row, padding_starts
    )


def token_ranges(lengths: Sequence[int]) -> list[tuple[int, int]]:
    ends = list(accumulate(lengths))
    return [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
