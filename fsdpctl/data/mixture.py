"""Samples of several sources in given shares, as a function of the position alone.

Note: the sources of PERIOD successive positions are fixed and repeat. So every PERIOD positions
have the same shares, and a division tells how many samples of a source come before a position.
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
    """Return the source of each position of a period, (PERIOD,), by rounded shares.

    Sources are spread evenly: the k-th of K samples of a source is at a random position in the
    k-th of K equal parts of the period.
    """
    targets = PERIOD * np.array(shares) / sum(shares)
    counts = np.maximum(np.floor(targets).astype(np.int64), (targets > 0).astype(np.int64))
    while (missing := PERIOD - int(counts.sum())) != 0:
        step = 1 if missing > 0 else -1
        gaps = np.where(counts + step > 0, step * (targets - counts), -np.inf)
        counts[int(np.argmax(gaps))] += step
    sources = np.repeat(np.arange(len(counts)), counts)
    numbers = np.concatenate([np.arange(each) for each in counts])
    bits = splitmix64((sources * PERIOD + numbers).astype(np.uint64), key=1)
    offsets = (numbers + bits.astype(np.float64) / 2.0**64) / counts[sources]
    order: NDArray[np.intp] = sources[np.argsort(offsets, kind="stable")]
    return order


class ShareSchedule:
    """Maps each position of a run to a source."""

    def __init__(self, shares: Sequence[float]) -> None:
        self._sources = _source_per_position(shares)
        table = self._sources[:, None] == np.arange(len(shares))
        # (PERIOD + 1, sources): how many samples of each source precede a position of the period
        self._sums = np.concatenate([np.zeros((1, len(shares)), np.int64), table.cumsum(0)])

    def counts(self, position: int) -> SourceCounts:
        periods, offset = divmod(position, PERIOD)
        counts: SourceCounts = periods * self._sums[PERIOD] + self._sums[offset]
        return counts

    def sources(self, position: int, length: int) -> NDArray[np.intp]:
        sources: NDArray[np.intp] = self._sources[np.arange(position, position + length) % PERIOD]
        return sources


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
    suffix: str = ""  # ends the location of errors

    @property
    def fingerprint(self) -> str:
        lines = (f"{each.content.fingerprint} {each.share!r}" for each in self.sources)
        return xxhash.xxh3_64_hexdigest("\n".join(lines).encode())

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all sources together."""
        return sum(each.content.num_tokens for each in self.sources)

    @property
    def num_bytes(self) -> int | None:
        sizes = [each.content.num_bytes for each in self.sources]
        return None if None in sizes else sum(each or 0 for each in sizes)

    def samples(self, seq_len: int) -> "MixedSamples":
        return MixedSamples(self, seq_len)


class MixedSamples(Samples):
    """The samples of a mixture, numbered source by source."""

    def __init__(self, mixture: Mixture, seq_len: int) -> None:
        """Split each source into samples of `seq_len` tokens; UsageError if a source has none."""
        self.seq_len, self.sources = seq_len, mixture.sources
        self.per_source: list[Samples] = [each.content.samples(seq_len) for each in mixture.sources]
        for source, samples in zip(mixture.sources, self.per_source, strict=True):
            if not len(samples):
                location = f"data.path: {source.name}{mixture.suffix}"
                raise UsageError(f"{location}: {samples.empty_message}")
        self._starts = np.cumsum([0, *map(len, self.per_source)], dtype=np.int64)
        self.origin = ", ".join(samples.origin for samples in self.per_source)
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
        samples, index = self._locate(number)
        return samples[index]

    def fetch(self, numbers: Iterable[int]) -> None:
        for samples, index in map(self._locate, numbers):
            samples.fetch([index])

    def source_of(self, number: int) -> int:
        return bisect_right(self._starts, number) - 1

    def _locate(self, number: int) -> tuple[Samples, int]:
        source = self.source_of(number)
        return self.per_source[source], number - int(self._starts[source])

    def order(self, position: int, length: int, seed: int) -> Indices:
        """Return the sample numbers at `length` positions of a run, shuffled within each source."""
        sources, before = self.schedule.sources(position, length), self.schedule.counts(position)
        result = np.empty(length, dtype=np.uint64)
        for source in np.unique(sources).tolist():
            is_of_source, count = sources == source, len(self.per_source[source])
            start, num = int(before[source]), int(is_of_source.sum())
            source_seed = seed + (source << 40)  # gives each source another order
            numbers = samples_at(start, num, count, source_seed)
            result[is_of_source] = numbers + np.uint64(self._starts[source])
        return result

    def count_tokens(self, numbers: Sequence[int]) -> int:
        return sum(samples.count_tokens([index]) for samples, index in map(self._locate, numbers))

    def epochs(self, position: int) -> Mapping[str, float]:
        """Return how many epochs of each source precede a position."""
        counts = self.schedule.counts(position).tolist()
        triples = zip(self.sources, counts, self.per_source, strict=True)
        return {source.name: count / len(samples) for source, count, samples in triples}

    def new_epochs(self, before: int, after: int) -> list[str]:
        """Return a line about each source that starts a new epoch between two positions."""
        earlier, later = self.epochs(before), self.epochs(after).items()
        numbers = ((name, int(epochs)) for name, epochs in later)
        return [f"{name}: epoch {n + 1} begins" for name, n in numbers if n > int(earlier[name])]

    def to_line(self, position: int) -> dict[str, Any]:
        """Return the tokens and epochs of each source before a position, for metrics.jsonl."""
        values: dict[str, Any] = {}
        counts = self.schedule.counts(position).tolist()
        triples = zip(self.epochs(position).items(), counts, self.per_source, strict=True)
        for (name, epochs), count, samples in triples:
            # Packed sequences differ in length: this is their mean.
            tokens = count * samples.num_tokens // len(samples)
            values |= {f"tokens/{name}": tokens, f"epochs/{name}": round(epochs, 6)}
        return values
