"""Data of an estimate that is not read whole: a sample, and what the data has times of it."""

from dataclasses import dataclass
from typing import NoReturn

from fsdpctl.data.packing import DocumentSet, Rows, Sample
from fsdpctl.data.streams import TokenStream


@dataclass(frozen=True, slots=True)
class Estimated:
    """Data whose tokens are estimated. Its rows can be counted, but not read."""

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
        return EstimatedRows(self, seq_len)


class EstimatedRows(Rows):
    """The number of sequences of estimated data."""

    def __init__(self, data: Estimated, seq_len: int) -> None:
        self.seq_len, self.origin = seq_len, data.sample.origin
        rows = data.sample.rows(seq_len)
        self.holds_documents, self._count = rows.holds_documents, (data.num_tokens - 1) // seq_len
        if isinstance(
            data.sample, DocumentSet
        ):  # of packed rows, the last one of a sample is short
            most = max(rows.num_tokens / seq_len, len(rows) - data.sample.packing.shares_rows)
            self._count = round(data.scale * most)

    @property
    def emptiness(self) -> str:
        return f"train.seq_len={self.seq_len}: longer than the data"

    def __len__(self) -> int:
        return max(0, self._count)

    def __getitem__(self, number: int) -> Sample:
        raise AssertionError("an estimate has no data to train on")
