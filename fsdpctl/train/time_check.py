"""What a step takes, beside what was foreseen."""

from pathlib import Path
from statistics import median
from typing import Any

from fsdpctl.estimate.saved import read_estimate

_STEPS = 3  # the first of which compiles and allocates


class TimeCheck:
    """Compares, after a few steps of a start, how long they took with what was foreseen."""

    def __init__(self, run_dir: Path) -> None:
        """Of a run in `run_dir`."""
        self._estimate = read_estimate(run_dir)
        self._seconds: list[float] = []

    def after(self, seconds: float) -> tuple[str, dict[str, Any]] | None:
        """After a step of so many seconds: a line to be shown, and it in figures, once."""
        if len(self._seconds) == _STEPS:
            return None
        self._seconds.append(seconds)
        estimate = self._estimate
        if len(self._seconds) < _STEPS or estimate is None:
            return None
        foreseen = estimate.predicted_step_seconds
        if foreseen is None:
            return None
        took = median(self._seconds[1:])
        off = foreseen / took - 1 if took else 0.0
        said = (
            f"time: {took:.3g} s a step (foreseen {foreseen:.3g} s, {off:+.0%}, by "
            f"{estimate.prediction_source})"
        )
        return said, {"step_seconds": took, "predicted_step_seconds": foreseen}
