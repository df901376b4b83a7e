"""Data of an estimate that is not read whole: a sample, and what the data has times of it."""

from dataclasses import dataclass
from typing import NoReturn

from fsdpctl.data.packing import DocumentSet, Rows, Sample
from fsdpctl.data.streams import TokenStream


@dataclass(frozen=True, slots=True)
class Estimated:
    """Data whose tokens are estimated. It can be counted, but not trained on."""

    sample: TokenStream | DocumentSet
    scale: float = 1.0  # times the tokens of the sample
    spread: float = 0.0  # the standard error of the tokens, of one
    num_bytes = None

    @property
    def fingerprint(self) -> NoReturn:
        raise AssertionError("an estimate has no data to train on")

    @property
    def num_tokens(self) -> int:
        return round(self.sample.num_tokens * self.scale)

    def rows(self, seq_len: int) -> "EstimatedRows":
        if isinstance(self.sample, TokenStream):
            return EstimatedRows(seq_len, (self.num_tokens - 1) // seq_len)
        rows, shares = self.sample.rows(seq_len), self.sample.packing.shares_rows
        # Of packed rows, the last ones of a sample are shorter than those of all data.
        most = max(rows.num_tokens / seq_len, len(rows) - shares)
        return EstimatedRows(seq_len, round(self.scale * most))


@dataclass(frozen=True)
class EstimatedRows(Rows):
    """A number of sequences, which are not read."""

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
