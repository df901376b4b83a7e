"""The order of samples in an epoch, and which documents share a sequence: functions of a seed.

A four-round Feistel network permutes the smallest power of four that contains the indices. Results
outside the range are permuted again until they are inside (cycle walking, Black and Rogaway 2002).
The result is a permutation of the range. It is computed when it is needed and not stored.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 4
_WINDOW = 16_384  # documents that are packed together
Indices = NDArray[np.uint64]  # indices of samples, unsigned for arithmetic modulo 2 ** 64
IntArray = NDArray[np.int64]  # positions, lengths and tokens


def splitmix64(values: Indices, key: int) -> Indices:
    """Return 64 random bits for each value: the finalizer of splitmix64 over value and key."""
    mixed = values + np.uint64(key & 0xFFFFFFFFFFFFFFFF)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def permute(indices: Indices, count: int, seed: int, epoch: int) -> Indices:
    """Apply a permutation of `range(count)`, keyed by seed and epoch, to `indices`."""
    half_bits = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half_bits)) - 1)
    keys = [
        (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1342543DE82EF95 + number * 0xA0761D6478BD642F)
        for number in range(1, _ROUNDS + 1)
    ]

    def feistel(values: Indices) -> Indices:
        left, right = values >> half_bits, values & mask
        for key in keys:
            left, right = right, left ^ (splitmix64(right, key) & mask)
        return (left << half_bits) | right

    with np.errstate(over="ignore"):  # arithmetic is modulo 2 ** 64
        result = feistel(indices.astype(np.uint64))
        while (outside := result >= count).any():
            result[outside] = feistel(result[outside])
    return result


def samples_at(position: int, length: int, count: int, seed: int) -> Indices:
    """Return the samples at `position … position + length - 1` of an endless series of epochs.

    Each epoch has all `count` samples, shuffled by `seed` and the number of the epoch.
    """
    positions = np.arange(position, position + length, dtype=np.uint64)
    epochs, within = positions // np.uint64(count), positions % np.uint64(count)
    result = np.empty(length, dtype=np.uint64)
    for epoch in np.unique(epochs):
        is_in_epoch = epochs == epoch
        result[is_in_epoch] = permute(within[is_in_epoch], count, seed, int(epoch))
    return result


def pack_sequences(lengths: Sequence[int] | IntArray, capacity: int, seed: int) -> list[list[int]]:
    """Return the numbers of the documents in each sequence of at most `capacity` tokens.

    `lengths` has the number of tokens of each document, from 1 to `capacity`. Best-fit decreasing
    (Johnson, 1973) packs windows of shuffled documents: padding is a few tenths of a percent, and a
    sequence has documents from anywhere in the data.
    """
    count = len(lengths)
    order = permute(np.arange(count, dtype=np.uint64), count, seed, epoch=0).astype(np.int64)
    sequences: list[list[int]] = []
    for start in range(0, count, _WINDOW):
        window = sorted(order[start : start + _WINDOW].tolist(), key=lambda each: -lengths[each])
        sequences += _best_fit(window, lengths, capacity)
    return sequences


def _best_fit(
    documents: Sequence[int], lengths: Sequence[int] | IntArray, capacity: int
) -> list[list[int]]:
    """Put each document into the fullest sequence that still has room for it.

    Bit N of `capacities` is set if a sequence has room for exactly N tokens. So the lowest set bit
    that is high enough names the sequence, without a search.
    """
    sequences: list[list[int]] = []
    by_capacity: dict[int, list[list[int]]] = defaultdict(list)
    capacities = 0
    for document in documents:
        length = int(lengths[document])
        fitting = capacities >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            sequence = by_capacity[left].pop()
            if not by_capacity[left]:
                capacities &= ~(1 << left)
        else:
            left, sequence = capacity, []
            sequences.append(sequence)
        sequence.append(document)
        if left > length:
            by_capacity[left - length].append(sequence)
            capacities |= 1 << (left - length)
    return sequences
