"""Samples of one length by number, from any kind of data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

IGNORED = -100  # a target that is masked
_Vector = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sample:
    """A sequence of tokens with their targets."""

    tokens: _Vector  # (seq_len,)
    targets: _Vector  # (seq_len,): the token after each of them, or IGNORED
    lengths: tuple[int, ...] = ()  # of its documents, if a sample can have several
    filling: int = 0  # tokens of the last document that are padding


class Rows(Protocol):
    """Samples that all have the same number of tokens."""

    @property
    def origin(self) -> str:
        """Where the samples are from, for errors."""
        ...

    @property
    def seq_len(self) -> int:
        """The tokens of a sample."""
        ...

    @property
    def holds_documents(self) -> bool:
        """Whether a sample can have several documents."""
        ...

    @property
    def num_targets(self) -> int:
        """The number of trained tokens in all samples."""
        ...

    @property
    def emptiness(self) -> str:
        """The error if there are no samples."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, number: int) -> Sample:
        """Return a sample."""
        ...

    def count_tokens(self, numbers: Sequence[int]) -> int:
        """Return the tokens of some samples, without padding."""
        ...


class Corpus(Protocol):
    """Data that can be split into samples of any length."""

    @property
    def fingerprint(self) -> str:
        """A checksum of the content and the loss mask."""
        ...

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        ...

    @property
    def num_bytes(self) -> int | None:
        """The size of the text, if known."""
        ...

    def rows(self, seq_len: int) -> Rows:
        """Return the samples of `seq_len` tokens; there may be none."""
        ...


def documents_of(sample: Sample) -> list[list[int]]:
    """Return the tokens of each document of a sample, with its last target if that is trained."""
    found, start = [], 0
    for length in sample.lengths or (len(sample.tokens),):
        end = start + length
        after = [int(sample.targets[end - 1])] if sample.targets[end - 1] != IGNORED else []
        found.append([*sample.tokens[start:end].tolist(), *after])
        start = end
    return found[:-1] if sample.filling else found
