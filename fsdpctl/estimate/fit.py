"""The largest run that fits."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdpctl.config.model import MOST_LAYERS
from fsdpctl.config.schema import Config
from fsdpctl.errors import UsageError
from fsdpctl.estimate.changes import (
    LONG,
    activations_on_host,
    feed_forward_in_chunks,
    recomputed,
    shared_samples,
)
from fsdpctl.estimate.estimator import Estimator, batches_of
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.resolve.decoder_check import check_shared_rows
from fsdpctl.resolve.machine import sample_groups
from fsdpctl.resolve.preflight import check_activation_offload

FITTED = {
    "micro_batch": "train.micro_batch_size",
    "seq_len": "train.seq_len",
    "model": "model.num_layers",
}
_MOST = {"micro_batch": 1 << 20, "model": MOST_LAYERS}
_COUNTED = 256  # blocks
_LENGTHS = 256  # tokens: lengths are multiples of it
_BITS = 5  # of the lengths of samples that need other settings


@dataclass(frozen=True, slots=True)
class Fit:
    """The largest value of a key with which a run fits."""

    key: str
    value: int  # 0: not even 1 does
    multiple: int  # that the value is a multiple of
    estimate: RunEstimate | None  # with it
    next: RunEstimate | None  # with the next value, which does not fit; None: a limit is reached

    @property
    def settings(self) -> str:
        """The value as command-line settings."""
        if self.estimate is None or self.key != FITTED["micro_batch"]:
            return f"{self.key}={self.value}"
        samples = self.estimate.batches.global_batch_size
        return f"{self.key}={self.value} train.global_batch_size={samples}"

    def to_dict(self) -> dict[str, Any]:
        """Return the value of `fit` in `--json`."""
        return {
            "key": self.key,
            "value": self.value,
            "settings": self.settings,
            "estimate": self.estimate.to_dict() if self.estimate else None,
            "next": self.next.to_dict() if self.next else None,
        }


@dataclass(frozen=True, slots=True)
class LargestModel:
    """The largest number of blocks with which a run fits."""

    num_layers: int
    num_params: int


def _valued(config: Config, what: str, value: int) -> Config:
    """Return `config` with another size, and the global batch that all ranks then process."""
    train = config.train
    if what == "seq_len":
        return replace(config, train=replace(train, seq_len=value))
    if what == "model":
        return replace(config, model=replace(config.model, num_layers=value))
    batches = batches_of(config)
    passes = config.accumulation.steps or batches.num_micro_batches
    samples = value * passes * sample_groups(config)
    return replace(
        config,
        train=replace(train, micro_batch_size=value, global_batch_size=samples),
        accumulation=replace(config.accumulation, steps=passes),
    )


def largest_that_fits(estimator: Estimator, config: Config, what: str) -> Fit:
    """Find the largest micro-batch, length or number of blocks of a resolved configuration."""
    most = _MOST.get(what, config.model.max_seq_len)
    begin = {
        "micro_batch": batches_of(config).micro_batch_size,
        "seq_len": config.train.seq_len,
        "model": config.model.num_layers,
    }[what]
    found = Fit(FITTED[what], 0, 1, None, None)
    if what == "seq_len" and most >= _LENGTHS:
        found = _largest(estimator, config, what, begin, most, multiple=_LENGTHS)
        most = _LENGTHS - 1
    if not found.value:
        found = _largest(estimator, config, what, begin, most, multiple=1)
    return found


def longer_samples(
    estimator: Estimator, config: Config, found: Fit
) -> Iterator[tuple[tuple[str, ...], Fit]]:
    """Yield settings with which longer samples fit than `found`, more and more together.

    Each comes with the longest samples that fit with them, to about five percent, or to 1,024
    tokens if that is more.
    """
    words: tuple[str, ...] = ()
    for make in (recomputed, shared_samples, activations_on_host, feed_forward_in_chunks):
        begin = max(found.value, LONG)
        config = _valued(config, "seq_len", begin)
        for change in [*make(config)][-1:]:
            if found.estimate is not None and found.next is None:
                return  # the model's own limit
            most = change.config.model.max_seq_len
            multiple = max(_LENGTHS, 1 << (min(begin, most).bit_length() - _BITS))
            about = (change.config, "seq_len", begin, most)
            try:
                check_shared_rows(change.config)
                check_activation_offload(change.config)
                longer = _largest(estimator, *about, multiple=multiple)
            except UsageError:
                continue
            if longer.value > found.value:
                words, config, found = (*words, *change.words), change.config, longer
                yield words, found


def largest_model(estimator: Estimator, config: Config) -> LargestModel | None:
    """Return how many blocks of a resolved configuration's model fit, if any.

    Above `_COUNTED` blocks the number is extrapolated: each further one takes as much memory.
    """
    most = estimator.estimate(_valued(config, "model", _COUNTED))
    if most.verdict != "fits":
        found = largest_that_fits(estimator, config, "model").estimate
        if found is None:
            return None
        return LargestModel(found.config.model.num_layers, found.num_params)
    half = estimator.estimate(_valued(config, "model", _COUNTED // 2))
    blocks = _COUNTED - _COUNTED // 2
    each, params = (half.margin - most.margin) // blocks, (most.num_params - half.num_params)
    more = min(most.margin // max(each, 1), MOST_LAYERS - _COUNTED)
    return LargestModel(_COUNTED + more, most.num_params + more * params // blocks)


def _largest(
    estimator: Estimator, config: Config, what: str, begin: int, most: int, *, multiple: int
) -> Fit:
    """Return the largest multiple that fits."""
    seen: dict[int, RunEstimate] = {}

    def fits(count: int) -> bool:
        if count not in seen:
            seen[count] = estimator.estimate(_valued(config, what, count * multiple))
        return seen[count].verdict == "fits"

    most //= multiple
    begin = min(max(begin // multiple, 1), most)
    count = _edge(fits, lambda at: seen[at].margin, begin, most)
    return Fit(FITTED[what], count * multiple, multiple, seen.get(count), seen.get(count + 1))


def _edge(fits: Callable[[int], bool], margin: Callable[[int], int], begin: int, most: int) -> int:
    """Return the largest value that fits while the next does not; 0 if 1 does not.

    Memory grows almost linearly with a size. The search tries the value at which a line through the
    last two leaves no margin, then its neighbor, then the middle.
    """
    low, high = 0, most + 1
    tried: list[int] = []
    value = begin
    while True:
        tried.append(value)
        if fits(value):
            low = value
        else:
            high = value
        if low + 1 == high:
            return low
        straight = _straight(tried[-2:], margin)
        if straight is None or (high > most and len(tried) % 2):
            value = 2 * value if high > most else high // 2
        elif len(tried) % 3 == 0:
            value = value + 1 if value == low else value - 1
        elif len(tried) % 3 == 1 and 0 < low < high <= most:
            value = (low + high) // 2
        else:
            value = straight
        value = min(max(value, low + 1), high - 1)


def _straight(tried: Sequence[int], margin: Callable[[int], int]) -> int | None:
    """Return the value at which a line through the last two leaves no margin."""
    if len(tried) < 2:
        return None
    (first, second), (before, after) = tried, map(margin, tried)
    if before == after:
        return None
    return int(second + after * (second - first) / (before - after))
