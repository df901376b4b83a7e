"""Data of an estimate of which a sample is read: its size in multiples of the sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from fsdpctl.data.packing import DocumentSet, Rows, Sample
from fsdpctl.data.streams import TokenStream


@dataclass(frozen=True, slots=True, eq=False)
class Estimated:
    """Data whose tokens are estimated. It can be counted, but not trained on."""

    sample: TokenStream | DocumentSet
    num_tokens: int
    scale: float = 1.0  # the bytes of the data / those read of the sample
    parts: Sequence[float] | None = None  # read of each document of the sample; None: all
    spread: float = 0.0  # the standard error of the tokens, of one
    num_bytes = None

    @property
    def fingerprint(self) -> NoReturn:
        raise AssertionError("an estimate has no data to train on")

    def rows(self, seq_len: int) -> "EstimatedRows":
        if isinstance(self.sample, TokenStream):
            return EstimatedRows(seq_len, (self.num_tokens - 1) // seq_len)
        rows, shares = self.sample.rows(seq_len), self.sample.packing.shares_rows
        # Of packed rows, the last ones of a sample are shorter than those of all data.
        most = max(rows.num_tokens / seq_len, len(rows) - shares)
        lengths = np.minimum(self.sample.lengths, seq_len if shares else 1)
        part = 1 if self.parts is None else np.dot(lengths, self.parts) / lengths.sum()
        return EstimatedRows(seq_len, round(self.scale * most * part))


@dataclass(frozen=True)
class EstimatedRows(Rows):
    """Sequences that can be counted, but not read."""

    seq_len: int
    count: int
    origin = "the data"

    @property
    def emptiness(self) -> str:
        return f"train.seq_len={self.seq_len}: longer than the data"

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Sample:
        raise AssertionError("an estimate has no data to train on")
