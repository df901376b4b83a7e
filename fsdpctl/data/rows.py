"""Samples of one length by their number, wherever they come from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

IGNORED = -100  # a target that does not count
Row = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sample:
    """A row of tokens."""

    tokens: Row  # (seq_len,)
    targets: Row  # (seq_len,): what follows each of them, or IGNORED
    lengths: tuple[int, ...] = ()  # of the documents that it holds, where it can be several
    filling: int = 0  # tokens of the last of them that only fill it up


class Rows(Protocol):
    """Samples that all have the same number of tokens."""

    @property
    def origin(self) -> str:
        """Where they are from, for errors."""
        ...

    @property
    def seq_len(self) -> int:
        """Tokens of one."""
        ...

    @property
    def holds_documents(self) -> bool:
        """Whether one can be several documents."""
        ...

    @property
    def num_targets(self) -> int:
        """Tokens that are trained, of all of them."""
        ...

    @property
    def emptiness(self) -> str:
        """What is to be said where there are none."""
        ...

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, number: int) -> Sample:
        """One of them."""
        ...

    def count_tokens(self, numbers: Sequence[int]) -> int:
        """Tokens of some, without what fills them up."""
        ...


class Corpus(Protocol):
    """What samples of any length can be made of."""

    @property
    def fingerprint(self) -> str:
        """Identifies its content, and which part of it is trained."""
        ...

    @property
    def num_tokens(self) -> int:
        """All that there are."""
        ...

    @property
    def num_bytes(self) -> int | None:
        """Of the text that they stand for, if known."""
        ...

    def rows(self, seq_len: int) -> Rows:
        """Its samples of `seq_len` tokens; there may be none."""
        ...


def documents_of(sample: Sample) -> list[list[int]]:
    """The tokens of each of its documents, with what follows the last one where that is trained."""
    found, start = [], 0
    for length in sample.lengths or (len(sample.tokens),):
        end = start + length
        after = [int(sample.targets[end - 1])] if sample.targets[end - 1] != IGNORED else []
        found.append([*sample.tokens[start:end].tolist(), *after])
        start = end
    return found[:-1] if sample.filling else found
