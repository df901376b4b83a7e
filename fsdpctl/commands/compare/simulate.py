"""Comparison of variants by prediction, on hardware that need not exist."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fsdpctl.commands.compare.row import OK, REFUSED, TOO_LARGE, Row
from fsdpctl.commands.compare.vary import Variant
from fsdpctl.errors import UsageError
from fsdpctl.estimate.accuracy import SHORT
from fsdpctl.estimate.advice import advice
from fsdpctl.estimate.duration import run_time
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.hardware import device_of
from fsdpctl.estimate.planned_steps import sent_in_step
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.estimate.search import decide
from fsdpctl.launch.begin import change_lines
from fsdpctl.plan.precision import Dtype
from fsdpctl.resolve.open import fill_on_cluster
from fsdpctl.resolve.place import notes_on_memory
from fsdpctl.run.flops import flops_per_token

_SHORT_STEPS = (
    "The host limits steps of GPUs below 100 ms, and data sheets do not describe it: such steps "
    "can take several times as long as predicted."
)


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


def predict(variants: Sequence[Variant]) -> Iterator[str]:
    """Predict all variants, of which nothing runs; yield notes on the predictions, a line each."""
    estimator = Estimator()
    for each in variants:
        yield from notes_on_memory(each.composed.config)
        try:
            yield from _predict(estimator, each)
        except UsageError as error:
            each.row = replace(each.row, status=f"{REFUSED}{error}")
    plans = [each.plan for each in variants if each.plan is not None]
    if plans and all(each.row.status != OK for each in variants):
        yield "no variant fits; changes that make the nearest fit:"
        nearest = max(plans, key=lambda plan: estimator.estimate(plan).margin)
        yield from change_lines(advice(estimator, nearest))
    if any((each.row.step_seconds or SHORT) < SHORT for each in variants):
        yield _SHORT_STEPS


def _predict(estimator: Estimator, each: Variant) -> Iterator[str]:
    placed = fill_on_cluster(each.composed, estimator.data_of)
    if placed.launch.device == "cpu":
        raise UsageError(
            "launch.device=cpu: --simulate predicts steps of GPUs; set cluster, or compare by "
            "runs without --simulate"
        )
    estimate, ranking = decide(estimator, placed, each.composed.unset)
    if ranking is not None and ranking.defaults and ranking.ranked:
        yield f"{each.row.label}: {ranking.summary}"
    each.plan = plan = estimate.plan
    each.row = replace(each.row, strategy=plan.config.strategy.name)
    step, units = estimator.predict(plan), estimator.traced_model(plan).units
    time = run_time(estimator, estimate, step)
    yield from (*filter(None, [time.unknown]), *time.notes)
    row = replace(
        each.row,
        world_size=time.num_ranks,
        tokens_per_second=time.tokens_per_second,
        step_seconds=step.seconds,
        error_band=time.band,
        exposed_communication_seconds=step.exposed_communication,
        mfu=_utilization(time.tokens_per_second, estimate),
        steps=time.steps,
        sent_bytes_per_step=sent_in_step(
            plan.config, units, estimate.batches.num_micro_batches
        ).total,
        **time.of_run,
    )
    each.row = with_memory(row, estimate)


def _utilization(speed: float, estimate: RunEstimate) -> float | None:
    config = estimate.config
    peak = device_of(config).flops[Dtype(config.precision.param_dtype).itemsize]
    if estimate.num_trained < estimate.num_params:
        return None
    per_token = flops_per_token(config.model, estimate.num_active, config.train.seq_len)
    return per_token * speed / (peak * config.num_ranks)
