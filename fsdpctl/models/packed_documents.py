"""Documents that are packed into a row of tokens without seeing one another."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from fsdpctl.plan.batch_plan import ContextParallel

ASSUMED_TOKENS = 256  # of a document of unknown length
Lengths = tuple[tuple[int, ...], ...]  # of the documents in each row of a batch, in order


@dataclass(frozen=True, slots=True)
class PackedDocuments:
    """The positions of the documents of a batch. All tensors are on the device."""

    lengths: Lengths
    positions: Tensor  # (batch, length) int64: of a token within its document
    # Where each document begins if all rows are one, int32; then the end, repeated up to a power of
    # two. So kernels get few different sizes, and code that was compiled for one serves others.
    offsets: Tensor
    longest: int  # at least the tokens of the longest: a power of two, or a full row
    device_type: str  # the device type whose kernels are used
    context: ContextParallel | None = None  # this rank's part of the rows; None: all of them
    one_per_row: bool = False  # every row is one document and padding, as if there were none
    padding_starts: Tensor | None = (
        None  # (batch, 1): where padding begins in each row; None: there is none
    )

    @property
    def local_positions(self) -> Tensor:
        return self.local_part(self.positions)

    @property
    def local_data_mask(self) -> Tensor:
        """Whether each of this rank's tokens is data, not padding."""
        ends = self.positions.shape[1] if self.padding_starts is None else self.padding_starts
        return self.local_part((self._row_positions < ends).expand_as(self.positions))

    def local_part(self, of_rows: Tensor) -> Tensor:
        """Return this rank's part of a tensor of all tokens, (batch, length)."""
        if self.context is None:
            return of_rows
        length = of_rows.shape[1] // self.context.size
        return of_rows.narrow(1, self.context.index * length, length)

    @property
    def first_keys(self) -> Tensor:
        """(batch, length, 1): the place in its row of the first token that a token may see."""
        return (self._row_positions - self.positions).unsqueeze(-1)

    @property
    def _row_positions(self) -> Tensor:
        return torch.arange(self.positions.shape[1], device=self.positions.device)

    def mask(self, window: int | None) -> Tensor:
        """Return (batch, 1, length, length): the at most `window` tokens that each sees."""
        places = self._row_positions
        sees = (places <= places.unsqueeze(-1)) & (places >= self.first_keys)
        if window is not None:
            sees = sees & (places > places.unsqueeze(-1) - window)
        return sees.unsqueeze(1)


def pack_documents(
    lengths: Lengths,
    device: torch.device,
    *,
    kernel_device_type: str = "",
    context: ContextParallel | None = None,
    one_per_row: bool = False,
    padding_starts: Sequence[int] = (),
) -> PackedDocuments:
    """Return the documents of a batch, whose rows have equal sums of `lengths`.

    `like` is the device type whose kernels are used, if it is another one; of the rest, see
    `Documents`. Without `ends`, there is no padding.
    """
    rows, size = len(lengths), sum(lengths[0])
    each = list(chain.from_iterable(lengths))
    positions = torch.cat([torch.arange(length) for length in each]).view(rows, size)
    offsets = torch.full((_power_of_two(len(each)) + 1,), rows * size, dtype=torch.int32)
    offsets[: len(each) + 1] = torch.tensor([0, *accumulate(each)], dtype=torch.int32)
    longest = min(size, _power_of_two(max(each)))
    sent = copy_to_device(positions, device), copy_to_device(offsets, device)
    stops = (
        copy_to_device(torch.tensor(padding_starts).view(-1, 1), device) if padding_starts else None
    )
    return PackedDocuments(
        lengths, *sent, longest, kernel_device_type or device.type, context, one_per_row, stops
    )


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy `values` to the device from pinned memory, without waiting for the device."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def assumed_documents(
    rows: int,
    size: int,
    device_type: str,
    *,
    context: ContextParallel | None = None,
    one_per_row: bool = False,
) -> PackedDocuments:
    """Return assumed documents, several in each row, with tensors without values."""
    count = 1 if one_per_row else max(2, size // ASSUMED_TOKENS)
    halves = (size - size // 2, size // 2) if size > 1 and not one_per_row else (size,)
    lengths = (halves,) * rows
    positions = torch.empty(rows, size, dtype=torch.int64)
    offsets = torch.empty(_power_of_two(rows * count) + 1, dtype=torch.int32)
    padding_starts = torch.empty(rows, 1, dtype=torch.int64)
    return PackedDocuments(
        lengths, positions, offsets, size, device_type, context, one_per_row, padding_starts
    )


def document_ranges(lengths: Sequence[int]) -> list[tuple[int, int]]:
    ends = list(accumulate(lengths))
    return [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
