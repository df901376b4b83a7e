"""Which documents share a row of so many tokens."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fsdpctl.data.order import permute

_WINDOW = 16_384  # documents that are packed together
Numbers = NDArray[np.int64]


def pack(lengths: Sequence[int] | Numbers, room: int, seed: int) -> list[list[int]]:
    """Rows of documents, by their numbers, of at most `room` tokens each.

    Best-fit decreasing (Johnson, 1973) over windows of shuffled documents: what remains empty is
    some tenths of a percent, and a row holds documents from anywhere. It follows from its arguments
    alone.

    Args:
        lengths: of all documents, each from 1 to `room`.
        room: tokens of a row.
        seed: decides which documents come together.
    """
    count = len(lengths)
    order = permute(np.arange(count, dtype=np.uint64), count, seed, 0).astype(np.int64)
    rows: list[list[int]] = []
    for start in range(0, count, _WINDOW):
        window = sorted(order[start : start + _WINDOW].tolist(), key=lambda each: -lengths[each])
        rows += _best_fit(window, lengths, room)
    return rows


def _best_fit(
    documents: Sequence[int], lengths: Sequence[int] | Numbers, room: int
) -> list[list[int]]:
    """Each into the row that it leaves the least room in.

    Bit N of `open_rows` says whether there are rows with room for N tokens: the lowest one that
    is high enough is found without looking at rows.
    """
    rows: list[list[int]] = []
    by_room: dict[int, list[list[int]]] = defaultdict(list)
    open_rows = 0
    for document in documents:
        length = int(lengths[document])
        fitting = open_rows >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            row = by_room[left].pop()
            if not by_room[left]:
                open_rows &= ~(1 << left)
        else:
            left, row = room, []
            rows.append(row)
        row.append(document)
        if left > length:
            by_room[left - length].append(row)
            open_rows |= 1 << (left - length)
    return rows
