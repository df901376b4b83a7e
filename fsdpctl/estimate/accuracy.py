"""How far published steps were from their predictions, by kind and GPU: the band of a prediction.

The errors are in conf/accuracy.json, which `benchmarks/published_steps.py` writes.
"""

import math
from dataclasses import dataclass
from functools import cache
from itertools import chain

from fsdpctl.estimate.cluster_specs import gpu_of
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.io.packages import package_folder
from fsdpctl.io.untrusted import read_json

ACCURACY = "accuracy.json"
SHORT_STEP = (
    0.1  # seconds; the host limits shorter steps of GPUs, and data sheets do not describe it
)
_MIN_STEPS = 5  # published steps that a band of their errors needs
_UNTESTED_RANGE = 0.5, 2.0  # of the predicted time, for other kinds
_OUTLIER_SHARE = 0.05  # of the published steps, on each side of their band
_SYMMETRIC_BELOW = 20  # with fewer steps, the band is as wide on one side as on the other
TIE = 0.01  # of the step time: less than the accuracy within a kind


@dataclass(frozen=True, slots=True)
class ErrorBand:
    """The range of times in which a step is expected, relative to the predicted time."""

    kind: str
    low: float
    high: float
    count: int  # of published steps of this kind
    unlike: str = ""  # the GPU, if none of them ran on it

    def __str__(self) -> str:
        if self.count < _MIN_STEPS:
            return f"{self.kind} steps: untested, up to twice as fast or slow"
        others = f" of other GPUs, none of {self.unlike} is published" if self.unlike else ""
        return f"{self.kind} steps{others}: {self.low - 1:+.0%} to {self.high - 1:+.0%}"


def error_kind(estimate: RunEstimate, seconds: float = math.inf) -> str:
    """Return the kind of a run with steps of `seconds`, by what predictions err most in."""
    return "short" if seconds < SHORT_STEP else estimate.kind


def band_of(estimate: RunEstimate, seconds: float) -> ErrorBand | None:
    """Return the error band of predicted seconds; None if the device is a CPU.

    It holds most steps of its kind, and all of those that ran on the same GPU.
    """
    if estimate.config.launch.device == "cpu":
        return None
    kind, card = error_kind(estimate, seconds), gpu_of(estimate.config)
    by_card = _errors().get(kind, {})
    errors, own = sorted(chain(*by_card.values())), by_card.get(card, [])
    if len(errors) < _MIN_STEPS:
        return ErrorBand(kind, *_UNTESTED_RANGE, len(errors))
    outside = int(_OUTLIER_SHARE * len(errors))
    low, high = 1 + min(errors[outside], 0.0), 1 + max(errors[-1 - outside], 0.0)
    if len(errors) < _SYMMETRIC_BELOW:
        high = max(1 / low, high)
        low = 1 / high
    low, high = min(low, 1 + min(own, default=0)), max(high, 1 + max(own, default=0))
    return ErrorBand(kind, low, high, len(errors), "" if own else card)


def is_faster(first: tuple[RunEstimate, float], second: tuple[RunEstimate, float]) -> bool:
    """Return whether the first of two predicted times is less, by more than they may err.

    Errors of one kind are alike; of two kinds, the bands must not overlap.
    """
    one, other = band_of(*first), band_of(*second)
    if one is None or other is None or one.kind == other.kind:
        return first[1] * (1 + TIE) < second[1]
    return first[1] * one.high < second[1] * other.low


@cache
def _errors() -> dict[str, dict[str, list[float]]]:
    return read_json(package_folder("conf") / ACCURACY, dict[str, dict[str, list[float]]])
