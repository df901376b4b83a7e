"""Samples of several sources in given shares, as a function of the position alone.

Note: a period of PERIOD positions has a fixed number of samples of each source, at fixed places, so
every window of that length has the same shares, and the samples of a source before any position
follow from division.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fsdpctl.data.estimated import EstimatedData
from fsdpctl.data.order import Indices, samples_at, splitmix64
from fsdpctl.data.packing import DocumentSet, Sample, Samples
from fsdpctl.data.streams import TokenStream
from fsdpctl.errors import UsageError

PERIOD = 4096  # samples
SourceCounts = NDArray[np.int64]


def _source_per_position(shares: Sequence[float]) -> NDArray[np.intp]:
    """Return the source of each place, evenly spread; each source has its share, rounded.

    The k-th of K samples of a source is at a random place in the k-th of K equal parts.
    """
    due = PERIOD * np.array(shares) / sum(shares)
    counts = np.maximum(np.floor(due).astype(np.int64), (due > 0).astype(np.int64))
    while (missing := PERIOD - int(counts.sum())) != 0:
        step = 1 if missing > 0 else -1
        counts[int(np.argmax(np.where(counts + step > 0, step * (due - counts), -np.inf)))] += step
    sources = np.repeat(np.arange(len(counts)), counts)
    numbers = np.concatenate([np.arange(each) for each in counts])
    bits = splitmix64((sources * PERIOD + numbers).astype(np.uint64), 1)
    places = (numbers + bits.astype(np.float64) / 2.0**64) / counts[sources]
    found: NDArray[np.intp] = sources[np.argsort(places, kind="stable")]
    return found


class ShareSchedule:
    """Which source each position of a run is from."""

    def __init__(self, shares: Sequence[float]) -> None:
        self._sources = _source_per_position(shares)  # (PERIOD,): the source of each position
        table = self._sources[:, None] == np.arange(len(shares))
        # (PERIOD + 1, sources): samples of each source before a place of the period
        self._sums = np.concatenate([np.zeros((1, len(shares)), np.int64), table.cumsum(0)])

    def counts(self, position: int) -> SourceCounts:
        periods, place = divmod(position, PERIOD)
        found: SourceCounts = periods * self._sums[PERIOD] + self._sums[place]
        return found

    def sources(self, position: int, length: int) -> NDArray[np.intp]:
        found: NDArray[np.intp] = self._sources[np.arange(position, position + length) % PERIOD]
        return found


@dataclass(frozen=True, slots=True)
class MixedSource:
    """A source of a mixture."""

    name: str
    share: float
    content: TokenStream | DocumentSet | EstimatedData


@dataclass(frozen=True, slots=True)
class Mixture:
    """Sources whose samples are mixed by share."""

    sources: tuple[MixedSource, ...]
    purpose: str = ""  # that errors name

    @property
    def fingerprint(self) -> str:
        about = (f"{each.content.fingerprint} {each.share!r}" for each in self.sources)
        return xxhash.xxh3_64_hexdigest("\n".join(about).encode())

    @property
    def num_tokens(self) -> int:
        """The tokens of all sources, each once."""
        return sum(each.content.num_tokens for each in self.sources)

    @property
    def num_bytes(self) -> int | None:
        sizes = [each.content.num_bytes for each in self.sources]
        return None if None in sizes else sum(each or 0 for each in sizes)

    def samples(self, seq_len: int) -> "MixedSamples":
        return MixedSamples(self, seq_len)


class MixedSamples(Samples):
    """The samples of a mixture. Their numbers go through the sources, one after the other."""

    def __init__(self, mixture: Mixture, seq_len: int) -> None:
        """Split the streams into samples of `seq_len` tokens; UsageError if a source has none."""
        self.seq_len, self.sources = seq_len, mixture.sources
        self.per_source: list[Samples] = [each.content.samples(seq_len) for each in mixture.sources]
        for part, rows in zip(mixture.sources, self.per_source, strict=True):
            if not len(rows):
                raise UsageError(f"data.path: {part.name}{mixture.purpose}: {rows.empty_message}")
        self._starts = np.cumsum([0, *map(len, self.per_source)], dtype=np.int64)
        self.origin = ", ".join(rows.origin for rows in self.per_source)
        self.isolates_documents = self.per_source[0].isolates_documents
        self.is_remote = any(each.is_remote for each in self.per_source)

    @property
    def empty_message(self) -> str:
        return self.per_source[0].empty_message

    @cached_property
    def schedule(self) -> ShareSchedule:
        return ShareSchedule([each.share for each in self.sources])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, number: int) -> Sample:
        rows, place = self._locate(number)
        return rows[place]

    def fetch(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            rows, place = self._locate(number)
            rows.fetch([place])

    def source_of(self, number: int) -> int:
        return bisect_right(self._starts, number) - 1

    def _locate(self, number: int) -> tuple[Samples, int]:
        part = self.source_of(number)
        return self.per_source[part], number - int(self._starts[part])

    def order(self, position: int, length: int, seed: int) -> Indices:
        """Return the samples at these positions of a run; each source has an order of its own."""
        sources, before = self.schedule.sources(position, length), self.schedule.counts(position)
        result = np.empty(length, dtype=np.uint64)
        for part in np.unique(sources).tolist():
            is_of, count = sources == part, len(self.per_source[part])
            found = samples_at(int(before[part]), int(is_of.sum()), count, seed + (part << 40))
            result[is_of] = found + np.uint64(self._starts[part])
        return result

    def count_tokens(self, numbers: Sequence[int]) -> int:
        return sum(rows.count_tokens([place]) for rows, place in map(self._locate, numbers))

    def epochs(self, position: int) -> Mapping[str, float]:
        """Return how often each source has been trained on before a position."""
        counts = self.schedule.counts(position).tolist()
        about = zip(self.sources, counts, self.per_source, strict=True)
        return {part.name: count / len(rows) for part, count, rows in about}

    def new_epochs(self, before: int, after: int) -> list[str]:
        """Describe the sources that began again between two positions."""
        earlier, later = self.epochs(before), self.epochs(after).items()
        again = ((name, int(now)) for name, now in later if int(now) > int(earlier[name]))
        return [f"{name}: epoch {epochs + 1} begins" for name, epochs in again]

    def to_line(self, position: int) -> dict[str, Any]:
        """Return the values of metrics.jsonl: tokens and epochs by source before a position."""
        found: dict[str, Any] = {}
        counts = self.schedule.counts(position).tolist()
        known = zip(self.epochs(position).items(), counts, self.per_source, strict=True)
        for (name, epochs), count, rows in known:
            tokens = count * rows.num_tokens // len(rows)  # of packed sequences, on average
            found |= {f"tokens/{name}": tokens, f"epochs/{name}": round(epochs, 6)}
        return found
