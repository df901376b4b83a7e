"""Which conversations validate, and how often each is in an epoch: decided by what they say.

So more data moves no old conversation to the other part, and equal ones are on the same side.
"""

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from fsdpctl.errors import UsageError

_PART, _REPEAT = 1, 2  # seeds: what decides the one says nothing of the other
_ALL = 1 << 64
Hashes = NDArray[np.uint64]


def is_held_out(content: bytes, fraction: float) -> bool:
    """Whether a conversation belongs to the `fraction` of all that validates."""
    return xxhash.xxh3_64_intdigest(content, seed=_PART) < int(fraction * _ALL)


def repeat_hash(content: bytes) -> int:
    """What decides whether a conversation is in an epoch once more than others of its file."""
    return xxhash.xxh3_64_intdigest(content, seed=_REPEAT)


def repeats(files: Sequence[Hashes], shares: Sequence[float]) -> list[NDArray[np.int64]]:
    """How often each conversation of each file is in an epoch, which is as long as without shares.

    Args:
        files: a hash for each conversation of each file.
        shares: what part of an epoch's conversations is of the file; their sum is one.

    Raises:
        UsageError: a file has no conversation, or its share is less than one.
    """
    total = sum(map(len, files))
    found = []
    for hashes, share in zip(files, shares, strict=True):
        wanted = round(share * total)
        if not len(hashes) or not wanted:
            raise UsageError(
                f"data.path: a share of {share:.3g} of {total} conversations, of a file with "
                f"{len(hashes)} to train on: that is none"
            )
        often, more = divmod(wanted, len(hashes))
        counts = np.full(len(hashes), often, dtype=np.int64)
        counts[np.argsort(hashes, kind="stable")[:more]] += 1
        found.append(counts)
    return found
