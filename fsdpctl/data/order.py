"""In which order the samples of an epoch are seen, computed per index: nothing is stored.

A four-round Feistel network permutes the smallest even-sized power of two that holds the indices;
results outside the range are permuted again until they fall into it (cycle walking, Black and
Rogaway 2002), which keeps it a permutation.
"""

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 4
Indices = NDArray[np.uint64]


def _mix(values: Indices, key: int) -> Indices:
    """A round function: the finaliser of splitmix64 over value and key."""
    mixed = values + np.uint64(key & 0xFFFFFFFFFFFFFFFF)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def permute(indices: Indices, count: int, seed: int, epoch: int) -> Indices:
    """Where a permutation of `range(count)`, keyed by seed and epoch, sends `indices`."""
    half_bits = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half_bits)) - 1)
    keys = [
        (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1342543DE82EF95 + number * 0xA0761D6478BD642F)
        for number in range(1, _ROUNDS + 1)
    ]

    def feistel(values: Indices) -> Indices:
        left, right = values >> half_bits, values & mask
        for key in keys:
            left, right = right, left ^ (_mix(right, key) & mask)
        return (left << half_bits) | right

    with np.errstate(over="ignore"):
        result = feistel(indices.astype(np.uint64))
        while (outside := result >= count).any():
            result[outside] = feistel(result[outside])
    return result


def samples_at(position: int, length: int, count: int, seed: int) -> Indices:
    """The samples at positions `position … position + length - 1` of an endless sequence of epochs.

    Args:
        position: samples consumed so far.
        length: how many are wanted.
        count: samples of an epoch.
        seed: every epoch's order follows from it.
    """
    positions = np.arange(position, position + length, dtype=np.uint64)
    epochs, within = positions // np.uint64(count), positions % np.uint64(count)
    result = np.empty(length, dtype=np.uint64)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        result[chosen] = permute(within[chosen], count, seed, int(epoch))
    return result
