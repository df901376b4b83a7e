"""The largest run that fits."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fsdpctl.config.schema import Config
from fsdpctl.train.machine import world_size
from fsdpctl.train.weigh import RunEstimate, Weigher, batches_of

FITTED = {
    "micro_batch": "train.micro_batch_size",
    "seq_len": "train.seq_len",
    "model": "model.num_layers",
}
_MOST = {"micro_batch": 1 << 20, "model": 1 << 14}


@dataclass(frozen=True, slots=True)
class Fit:
    """The largest value of a key with which a run fits."""

    key: str
    value: int  # 0: not even 1 does
    estimate: RunEstimate | None  # with it
    following: RunEstimate | None  # with the next value, which does not; None: there is a limit

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        return {
            "key": self.key,
            "value": self.value,
            "estimate": self.estimate.to_dict() if self.estimate else None,
            "following": self.following.to_dict() if self.following else None,
        }


def _valued(config: Config, what: str, value: int) -> Config:
    """`config` with another size; the global batch is what all ranks then take in."""
    train = config.train
    if what == "seq_len":
        return replace(config, train=replace(train, seq_len=value))
    if what == "model":
        return replace(config, model=replace(config.model, num_layers=value))
    batches = batches_of(config)
    passes = config.accumulation.steps or batches.num_micro_batches
    samples = value * passes * world_size(config)
    return replace(
        config,
        train=replace(train, micro_batch_size=value, global_batch_size=samples),
        accumulation=replace(config.accumulation, steps=passes),
    )


def largest_that_fits(weigher: Weigher, config: Config, what: str) -> Fit:
    """Search the largest micro-batch, length or number of blocks of a resolved configuration."""
    seen: dict[int, RunEstimate] = {}

    def fits(value: int) -> bool:
        if value not in seen:
            seen[value] = weigher.weigh(_valued(config, what, value))
        return seen[value].verdict == "fits"

    most = _MOST.get(what, config.model.max_seq_len)
    begin = {
        "micro_batch": batches_of(config).micro_batch_size,
        "seq_len": config.train.seq_len,
        "model": config.model.num_layers,
    }[what]
    value = _edge(fits, lambda at: seen[at].margin, min(begin, most), most)
    return Fit(FITTED[what], value, seen.get(value), seen.get(value + 1))


def _edge(fits: Callable[[int], bool], margin: Callable[[int], int], begin: int, most: int) -> int:
    """The largest value that fits where the next does not; 0 if 1 does not."""
    low, high = 0, most + 1
    value = begin
    while low + 1 < high:
        if fits(value):
            low = value
        else:
            high = value
        if high == most + 1:
            value = min(2 * low, most)
        elif low == 0:
            value = high // 2 or 1
            if high == 1:
                break
        else:
            value = _between(low, high, margin(low), margin(high))
    return low


def _between(low: int, high: int, spare: int, missing: int) -> int:
    """Where a straight line crosses, as a rule next to the edge; else the middle."""
    guess = low + int((high - low) * spare / max(1, spare - missing))
    if high - low > 8 and spare > 0 > missing:
        return min(max(guess, low + 1), high - 1)
    return (low + high) // 2
