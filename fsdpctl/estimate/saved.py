"""The estimate of a run, saved in its directory."""

import json
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from fsdpctl.errors import UsageError
from fsdpctl.estimate.estimator import Estimator, on_cluster
from fsdpctl.estimate.hardware import at_speed
from fsdpctl.estimate.planned_steps import estimate_run
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.io.files import replace
from fsdpctl.io.run_files import ESTIMATE as ESTIMATE
from fsdpctl.io.untrusted import read_json
from fsdpctl.plan.strategy import FSDPCTL
from fsdpctl.resolve.settle import RunPlan


@dataclass(frozen=True, slots=True)
class SavedEstimate:
    """The estimated peak of the rank that needs most, and the predicted step time."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_engine_bytes: int | None  # of the allocated bytes, those of fsdpctl's engine
    predicted_step_seconds: float | None = None
    prediction_source: str = ""  # of the hardware specs


def write_estimate(
    run_dir: Path,
    plan: RunPlan,
    module: nn.Module,
    found: RunEstimate,
    estimator: Estimator,
) -> None:
    """Write the estimate of a run, and the predicted time of its steps, to its directory."""
    engine = None
    if plan.config.engine.name == FSDPCTL:
        passes = plan.batches.num_micro_batches
        engine = estimate_run(plan.config, module, passes).peak_bytes
    content = {
        **found.to_dict(),
        "peak_engine_bytes": engine,
        **_prediction(plan, estimator),
    }
    text = json.dumps(content, indent=2)
    replace(run_dir / ESTIMATE, text + "\n")


def _prediction(plan: RunPlan, estimator: Estimator) -> dict[str, float | str]:
    described, source = at_speed(on_cluster(plan))
    try:
        seconds = estimator.predict(described).seconds
    except UsageError:
        return {}  # the run does not need it
    return {"predicted_step_seconds": seconds, "prediction_source": source}


def read_estimate(run_dir: Path) -> SavedEstimate | None:
    """Return the saved estimate, or None if there is no valid one."""
    try:
        return read_json(run_dir / ESTIMATE, SavedEstimate)
    except UsageError:
        return None  # the run does not need it
