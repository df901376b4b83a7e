"""What was estimated of a run, kept in its directory."""

import json
from dataclasses import dataclass
from pathlib import Path

from fsdpctl.errors import UsageError
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.foresight import Foresight
from fsdpctl.estimate.here import with_speed
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.estimate.run_plan import estimate_run
from fsdpctl.io.documents import read_json
from fsdpctl.plan.engines import OURS
from fsdpctl.resolve.machine import placed_on_cluster
from fsdpctl.resolve.run import ResolvedRun

ESTIMATE = "estimate.json"


@dataclass(frozen=True, slots=True)
class KeptEstimate:
    """The most that the fullest rank was estimated to hold."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_engine_bytes: int | None  # of allocated, what our engine owns
    foreseen_step_seconds: float | None = None
    foreseen_by: str = ""  # whose figures, in words


def estimate_here(run: ResolvedRun, estimator: Estimator) -> RunEstimate:
    """The estimate for a run on this machine."""
    return estimator.estimate(placed_on_cluster(run.config))


def write_estimate(
    run_dir: Path, run: ResolvedRun, found: RunEstimate, estimator: Estimator
) -> None:
    """Keep the estimate for a run in its directory, and what a step is foreseen to take."""
    content = {
        **found.to_dict(),
        "peak_engine_bytes": engine_bytes(run),
        **_foreseen(run, estimator),
    }
    text = json.dumps(content, indent=2)
    (run_dir / ESTIMATE).write_text(text + "\n", encoding="utf-8")


def _foreseen(run: ResolvedRun, estimator: Estimator) -> dict[str, float | str]:
    described, whose = with_speed(placed_on_cluster(run.config))
    try:
        seconds = Foresight(estimator).step(described).seconds
    except UsageError:
        return {}  # nothing depends on it
    return {"foreseen_step_seconds": seconds, "foreseen_by": whose}


def engine_bytes(run: ResolvedRun) -> int | None:
    """The most that the engine of the fullest rank will hold; None for PyTorch's own."""
    if run.config.engine.name != OURS:
        return None
    return estimate_run(run.config, run.module, run.batches.num_micro_batches).peak_bytes


def read_estimate(run_dir: Path) -> KeptEstimate | None:
    """What was kept, if it was."""
    try:
        return read_json(run_dir / ESTIMATE, KeptEstimate)
    except UsageError:
        return None  # nothing depends on it
