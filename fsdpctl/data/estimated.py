"""Data whose size is extrapolated from excerpts that were read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NoReturn

import numpy as np

from fsdpctl.data.packing import DocumentSet, Sample, Samples
from fsdpctl.data.streams import TokenStream


@dataclass(frozen=True, slots=True, eq=False)
class EstimatedData:
    """Data with an estimated number of tokens. It can be counted, but not trained on."""

    excerpt: TokenStream | DocumentSet
    num_tokens: int
    scale: float = 1.0  # bytes of the data / bytes of the excerpt
    fractions: Sequence[float] | None = None  # the part of each document in the excerpt; None: all
    relative_error: float = 0.0  # standard error / `num_tokens`
    num_bytes: ClassVar[None] = None  # unknown

    @property
    def fingerprint(self) -> NoReturn:
        raise AssertionError("an estimate has no data to train on")

    def samples(self, seq_len: int) -> "EstimatedSamples":
        if isinstance(self.excerpt, TokenStream):
            return EstimatedSamples(seq_len, (self.num_tokens - 1) // seq_len)
        sequences, packs = self.excerpt.samples(seq_len), self.excerpt.packing.shares_sequences
        # The last sequences of an excerpt are packed less densely than the sequences of all data.
        num_sequences = max(sequences.num_tokens / seq_len, len(sequences) - packs)
        # A document counts by its tokens if documents are packed, else as one sequence.
        weights = np.minimum(self.excerpt.lengths, seq_len if packs else 1)
        part = 1 if self.fractions is None else np.dot(weights, self.fractions) / weights.sum()
        return EstimatedSamples(seq_len, round(self.scale * num_sequences * part))


@dataclass(frozen=True)
class EstimatedSamples(Samples):
    """Sequences that can be counted, but not read."""

    seq_len: int
    count: int
    origin = "the data"

    @property
    def empty_message(self) -> str:
        return f"train.seq_len={self.seq_len}: longer than the data"

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Sample:
        raise AssertionError("an estimate has no data to train on")
