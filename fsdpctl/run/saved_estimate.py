"""Reads the estimate that a run saved in its directory before it started; needs no torch."""

from dataclasses import dataclass
from pathlib import Path

from fsdpctl.errors import UsageError
from fsdpctl.io.run_files import ESTIMATE
from fsdpctl.io.untrusted import Count, read_json


@dataclass(frozen=True, slots=True)
class SavedEstimate:
    """The estimated peak of the rank that needs most, and the predicted step time."""

    peak_allocated_bytes: Count
    peak_reserved_bytes: Count
    peak_engine_bytes: Count | None  # of the allocated bytes, those of fsdpctl's engine
    predicted_step_seconds: float | None = None
    prediction_source: str = ""  # of the hardware specs


def read_estimate(run_dir: Path) -> SavedEstimate | None:
    """Return the saved estimate, or None if there is no valid one."""
    try:
        return read_json(run_dir / ESTIMATE, SavedEstimate)
    except UsageError:
        return None  # the run does not need it
