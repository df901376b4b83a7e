"""Error bands of predicted step times, from the errors for published steps by kind and GPU.

The errors are measured / predicted time - 1, in conf/accuracy.json, which
`benchmarks/published_steps.py` writes.
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
# Seconds. The host limits shorter steps of GPUs, and data sheets do not describe the host.
SHORT_STEP = 0.1
_MIN_STEPS = 5  # fewest published steps of a kind for a band
_UNTESTED_RANGE = 0.5, 2.0  # relative to the predicted time, for kinds without a band
_OUTLIER_SHARE = 0.05  # share of published steps left out on each side of a band
_SYMMETRIC_BELOW = 20  # with fewer published steps, both sides of a band have the larger width
TIE = 0.01  # share of the step time: a smaller difference is below the accuracy within a kind


@dataclass(frozen=True, slots=True)
class ErrorBand:
    """The range in which the time of a step is expected, relative to the predicted time."""

    kind: str
    low: float
    high: float
    count: int  # published steps of this kind
    unlike: str = ""  # the GPU of the run, if no published step of this kind ran on it

    def __str__(self) -> str:
        if self.count < _MIN_STEPS:
            return f"{self.kind} steps: untested, up to twice as fast or slow"
        scope = f" of other GPUs, none of {self.unlike} is published" if self.unlike else ""
        return f"{self.kind} steps{scope}: {self.low - 1:+.0%} to {self.high - 1:+.0%}"


def error_kind(estimate: RunEstimate, seconds: float = math.inf) -> str:
    """Return the kind of a run with steps of `seconds`: runs of one kind have similar errors."""
    return "short" if seconds < SHORT_STEP else estimate.kind


def band_of(estimate: RunEstimate, seconds: float) -> ErrorBand | None:
    """Return the error band of predicted seconds; None if the device is a CPU.

    The band contains most published steps of the run's kind, and all that ran on the same GPU.
    """
    if estimate.config.launch.device == "cpu":
        return None
    kind, gpu = error_kind(estimate, seconds), gpu_of(estimate.config)
    by_gpu = _errors().get(kind, {})
    errors, of_gpu = sorted(chain(*by_gpu.values())), by_gpu.get(gpu, [])
    if len(errors) < _MIN_STEPS:
        return ErrorBand(kind, *_UNTESTED_RANGE, len(errors))
    outside = int(_OUTLIER_SHARE * len(errors))
    low, high = 1 + min(errors[outside], 0.0), 1 + max(errors[-1 - outside], 0.0)
    if len(errors) < _SYMMETRIC_BELOW:
        high = max(1 / low, high)
        low = 1 / high
    low, high = min(low, 1 + min(of_gpu, default=0)), max(high, 1 + max(of_gpu, default=0))
    return ErrorBand(kind, low, high, len(errors), "" if of_gpu else gpu)


def is_faster(first: tuple[RunEstimate, float], second: tuple[RunEstimate, float]) -> bool:
    """Return whether the first of two predicted times is less, by more than the possible error.

    Runs of one kind have similar errors, so only TIE counts. Bands of two kinds must not overlap.
    """
    band, other = band_of(*first), band_of(*second)
    if band is None or other is None or band.kind == other.kind:
        return first[1] * (1 + TIE) < second[1]
    return first[1] * band.high < second[1] * other.low


@cache
def _errors() -> dict[str, dict[str, list[float]]]:
    return read_json(package_folder("conf") / ACCURACY, dict[str, dict[str, list[float]]])
