"""Search for the largest micro-batch, sequence length or model with which a run fits."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from fsdpctl.config.model import MAX_LAYERS
from fsdpctl.config.schema import Filled
from fsdpctl.config.selection import MICRO_BATCH, Selection
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.estimate.search import fitting_or_closest, largest_true
from fsdpctl.resolve.run_plan import RunPlan

FIT_KEYS = {"micro_batch": MICRO_BATCH, "seq_len": "train.seq_len", "model": "model.num_layers"}
_MAX_VALUES = {"micro_batch": 1 << 20, "model": MAX_LAYERS}
_LENGTH_MULTIPLE = 256  # tokens; lengths from 256 are multiples of 256


@dataclass(frozen=True, slots=True)
class LargestFit:
    """The largest value of a key with which a run fits."""

    key: str
    value: int  # 0: not even 1 fits
    multiple: int  # the difference to the next value that is tried
    estimate: RunEstimate | None  # with the value; None if the value is 0
    next: RunEstimate | None  # with the next value, which does not fit; None: a limit is reached
    names: tuple[str, ...] = ()  # the settings that are selected if their defaults do not fit

    @property
    def values(self) -> dict[str, int]:
        """The value, and the samples per step that follow from a micro-batch."""
        values, estimate = {self.key: self.value}, self.estimate
        if estimate is not None and self.key == MICRO_BATCH:
            values["train.global_batch_size"] = estimate.batches.global_batch_size
        return values

    @property
    def settings(self) -> str:
        """The values and the selection, as the command line takes them."""
        settings, estimate = [f"{key}={value}" for key, value in self.values.items()], self.estimate
        if estimate is not None and self.names:
            config = estimate.config
            settings += Selection.of(config).settings(self.names, Selection.default(config))
        return " ".join(settings)

    def to_dict(self) -> dict[str, Any]:
        return {
            "key": self.key, "value": self.value, "settings": self.settings,
            "estimate": self.estimate.to_dict() if self.estimate else None,
            "next": self.next.to_dict() if self.next else None,
        }  # fmt: skip


def _with_value(plan: RunPlan, dimension: str, value: int) -> Filled:
    """Return the settings of `plan` with another value, and the global batch that follows."""
    values = {FIT_KEYS[dimension]: value}
    if dimension == "micro_batch":
        passes = plan.batches.num_micro_batches
        samples = value * passes * plan.config.data_parallel_size
        values |= {"accumulation.steps": passes, "train.global_batch_size": samples}
    return plan.requested.changed(values)


def largest_that_fits(
    estimator: Estimator, plan: RunPlan, dimension: str, names: Collection[str] = ()
) -> LargestFit:
    """Find the largest micro-batch, sequence length or number of blocks with which a run fits.

    `dimension` is a key of FIT_KEYS. Settings in `names` are selected if their defaults do not fit.
    """
    key, config = FIT_KEYS[dimension], plan.config
    most, first = _MAX_VALUES.get(dimension, config.model.max_seq_len), config.value(key)
    names = tuple(each for each in names if each != key)

    def largest(limit: int, multiple: int) -> LargestFit:
        estimates: dict[int, RunEstimate] = {}

        def fits(count: int) -> bool:
            requested = _with_value(plan, dimension, count * multiple)
            estimates[count] = fitting_or_closest(estimator, requested, names)
            return estimates[count].leaves_reserve

        limit //= multiple
        begin = min(max(first // multiple, 1), limit)
        count = largest_true(fits, low=0, high=limit, first=begin)
        estimate, next_estimate = estimates.get(count), estimates.get(count + 1)
        return LargestFit(key, count * multiple, multiple, estimate, next_estimate, names)

    if dimension == "seq_len" and most >= _LENGTH_MULTIPLE:
        length = largest(most, _LENGTH_MULTIPLE)
        if length.value:
            return length
        most = _LENGTH_MULTIPLE - 1
    return largest(most, 1)
