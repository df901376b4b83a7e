"""Comparison of variants by prediction, on hardware that need not exist."""

from collections.abc import Sequence
from dataclasses import replace

from fsdpctl.commands.compare.row import OK, REFUSED, TOO_LARGE, Row
from fsdpctl.commands.compare.vary import Variant
from fsdpctl.config.schema import Config
from fsdpctl.errors import UsageError
from fsdpctl.estimate.accuracy import SHORT
from fsdpctl.estimate.advice import advice
from fsdpctl.estimate.duration import RunTime, run_time
from fsdpctl.estimate.estimator import Estimator, StepPrediction
from fsdpctl.estimate.planned_steps import sent_in_step
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.estimate.search import decide
from fsdpctl.launch.begin import change_lines
from fsdpctl.resolve.open import fill_on_cluster
from fsdpctl.resolve.place import notes_on_memory
from fsdpctl.run.flops import flops_per_token

_SHORT_STEPS = (
    "The host limits steps of GPUs below 100 ms, and data sheets do not describe it: such steps "
    "can take several times as long as predicted."
)
_TERA = 1e12


def with_memory(row: Row, estimate: RunEstimate) -> Row:
    """Return `row` with its estimated memory and its status; what does not fit has no length."""
    status = OK
    if found := estimate.shortages:
        status = f"{TOO_LARGE}{'; '.join(found)}"
        row = replace(row, hours=None, gpu_hours=None, cost=None)
    return replace(
        row,
        estimated_peak_tensor_bytes=estimate.allocated,
        estimated_peak_reserved_bytes=estimate.peak_reserved,
        memory_bytes=estimate.available,
        status=status,
    )


class SimulatedComparison:
    """A comparison in which nothing runs."""

    def __init__(self, variants: Sequence[Variant]) -> None:
        self._estimator = Estimator()
        self.variants = list(variants)
        self.notes: list[str] = []  # on the predictions, a line each

    @property
    def rows(self) -> list[Row]:
        """A row for each variant, in their order."""
        return [each.row for each in self.variants]

    def run(self) -> None:
        """Predict all variants."""
        for each in self.variants:
            about = notes_on_memory(each.composed.config)
            self.notes += [line for line in about if line not in self.notes]
            try:
                self._predict(each)
            except UsageError as error:
                each.row = replace(each.row, status=f"{REFUSED}{error}")
        plans = [each.plan for each in self.variants if each.plan is not None]
        if plans and all(each.row.status != OK for each in self.variants):
            nearest = max(plans, key=lambda plan: self._estimator.estimate(plan).margin)
            self.notes.append("no variant fits; changes that make the nearest fit:")
            self.notes += change_lines(advice(self._estimator, nearest))
        if any((each.row.step_seconds or SHORT) < SHORT for each in self.variants):
            self.notes.append(_SHORT_STEPS)

    def _predict(self, each: Variant) -> None:
        placed = fill_on_cluster(each.composed, self._estimator.data_of)
        if placed.launch.device == "cpu":
            raise UsageError(
                "launch.device=cpu: --simulate predicts steps of GPUs; set cluster, or compare by "
                "runs without --simulate"
            )
        estimate, ranking = decide(self._estimator, placed, each.composed.unset)
        if ranking is not None and ranking.defaults and ranking.ranked:
            self.notes.append(f"{each.row.label}: {ranking.summary}")
        each.plan = plan = estimate.plan
        config = plan.config
        each.row = replace(each.row, strategy=config.strategy.name)
        step = self._estimator.predict(plan)
        units = self._estimator.traced_model(plan).units
        sent = sent_in_step(config, units, estimate.batches.num_micro_batches).total
        time = run_time(self._estimator, estimate, step)
        about = (*filter(None, [time.unknown]), *time.notes)
        self.notes += [line for line in about if line not in self.notes]
        row = replace(_with_times(each.row, time, step, estimate), sent_bytes_per_step=sent)
        each.row = with_memory(row, estimate)


def _with_times(row: Row, time: RunTime, step: StepPrediction, estimate: RunEstimate) -> Row:
    return replace(
        row,
        world_size=time.num_ranks,
        tokens_per_second=time.tokens_per_second,
        step_seconds=step.seconds,
        error_band=time.band,
        exposed_communication_seconds=step.exposed_communication,
        mfu=_utilization(estimate.config, time.tokens_per_second, estimate),
        steps=time.steps,
        **time.of_run,
    )


def _utilization(config: Config, speed: float, estimate: RunEstimate) -> float | None:
    peak = config.cluster.flops
    if config.precision.param_dtype != "bfloat16":
        peak = config.cluster.flops_fp32
    if peak is None or estimate.num_trained < estimate.num_params:
        return None
    per_token = flops_per_token(config.model, estimate.num_active, config.train.seq_len)
    return per_token * speed / (peak * _TERA * config.num_ranks)
