"""Saves the estimate of a run in its directory, before it starts."""

import json
from pathlib import Path

from torch import nn

from fsdpctl.errors import UsageError
from fsdpctl.estimate.estimator import Estimator, on_cluster
from fsdpctl.estimate.hardware import at_speed
from fsdpctl.estimate.planned_steps import estimate_run
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.io.files import replace
from fsdpctl.io.run_files import ESTIMATE
from fsdpctl.plan.strategy import FSDPCTL
from fsdpctl.resolve.settle import RunPlan


def write_estimate(
    run_dir: Path,
    plan: RunPlan,
    module: nn.Module,
    found: RunEstimate,
    estimator: Estimator,
) -> None:
    """Write the estimate of a run, and the predicted time of its steps on GPUs."""
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
    if plan.config.launch.device == "cpu":
        return {}
    described, source = at_speed(on_cluster(plan))
    try:
        seconds = estimator.predict(described).seconds
    except UsageError:
        return {}  # the run does not need it
    return {"predicted_step_seconds": seconds, "prediction_source": source}
