"""Search for the largest micro-batch, length or number of blocks with which a run fits."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from fsdpctl.config.model import MAX_LAYERS
from fsdpctl.config.schema import Filled
from fsdpctl.config.selection import MICRO_BATCH, Selection
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.estimate.search import largest_true, least_memory
from fsdpctl.resolve.run_plan import RunPlan

FIT_KEYS = {"micro_batch": MICRO_BATCH, "seq_len": "train.seq_len", "model": "model.num_layers"}
_MAX_VALUES = {"micro_batch": 1 << 20, "model": MAX_LAYERS}
_LENGTH_MULTIPLE = 256  # tokens: lengths are multiples of it


@dataclass(frozen=True, slots=True)
class LargestFit:
    """The largest value of a key with which a run fits."""

    key: str
    value: int  # 0: not even 1 does
    multiple: int  # that the value is a multiple of
    estimate: RunEstimate | None  # with it
    next: RunEstimate | None  # with the next value, which does not fit; None: a limit is reached
    names: tuple[str, ...] = ()  # of the settings that are selected if their defaults do not fit

    @property
    def values(self) -> dict[str, int]:
        """The value, and the samples of a step that it needs."""
        values, found = {self.key: self.value}, self.estimate
        if found is not None and self.key == MICRO_BATCH:
            values["train.global_batch_size"] = found.batches.global_batch_size
        return values

    @property
    def settings(self) -> str:
        words, found = [f"{name}={value}" for name, value in self.values.items()], self.estimate
        if found is not None and self.names:
            words += Selection.of(found.config).settings(
                self.names, Selection.default(found.config)
            )
        return " ".join(words)

    def to_dict(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "value": self.value,
            "settings": self.settings,
            "estimate": self.estimate.to_dict() if self.estimate else None,
            "next": self.next.to_dict() if self.next else None,
        }


def _with_value(plan: RunPlan, what: str, value: int) -> Filled:
    """Return the settings of `plan` with another size, and the global batch of all ranks then."""
    values = {FIT_KEYS[what]: value}
    if what == "micro_batch":
        passes = plan.batches.num_micro_batches
        samples = value * passes * plan.config.num_groups
        values |= {"accumulation.steps": passes, "train.global_batch_size": samples}
    return plan.requested.changed(values)


def largest_that_fits(
    estimator: Estimator, plan: RunPlan, what: str, names: Collection[str] = ()
) -> LargestFit:
    """Find the largest micro-batch, length or number of blocks of a run.

    The settings of `names` have their defaults if these fit, else values that fit.
    """
    key, config = FIT_KEYS[what], plan.config
    most, first = _MAX_VALUES.get(what, config.model.max_seq_len), config.value(key)
    names = tuple(each for each in names if each != key)

    def largest(most: int, multiple: int) -> LargestFit:
        seen: dict[int, RunEstimate] = {}

        def fits(count: int) -> bool:
            seen[count] = least_memory(estimator, _with_value(plan, what, count * multiple), names)
            return seen[count].leaves_reserve

        most //= multiple
        count = largest_true(fits, 0, most, min(max(first // multiple, 1), most))
        found, over = seen.get(count), seen.get(count + 1)
        return LargestFit(key, count * multiple, multiple, found, over, names)

    found = LargestFit(key, 0, 1, None, None)
    if what == "seq_len" and most >= _LENGTH_MULTIPLE:
        found, most = largest(most, _LENGTH_MULTIPLE), _LENGTH_MULTIPLE - 1
    return found if found.value else largest(most, 1)
