"""The results of variants: measured in a short run, or predicted for any hardware."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from fsdpctl.commands.compare.report import FAILED, OK, REFUSED, TOO_LARGE, VariantResult
from fsdpctl.commands.compare.variants import Variant
from fsdpctl.commands.printing import note
from fsdpctl.config.schema import Origin, Resolved
from fsdpctl.errors import FsdpctlError, InterruptError, StoppedError, UsageError
from fsdpctl.estimate.accuracy import SHORT_STEP
from fsdpctl.estimate.cluster_specs import device_of
from fsdpctl.estimate.duration import run_time
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.planned_steps import sent_per_step
from fsdpctl.estimate.resolve_auto import resolve_auto, resolve_auto_of_run
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.estimate.suggestions import suggest
from fsdpctl.estimate.summary import describe_suggestions
from fsdpctl.io.activity import doing
from fsdpctl.io.run_files import METRICS
from fsdpctl.launch.workers import launch_workers
from fsdpctl.models.module_spec import module_units
from fsdpctl.plan.precision import Dtype
from fsdpctl.resolve.auto_values import Stage, fill_auto
from fsdpctl.resolve.machine import notes_on_memory
from fsdpctl.resolve.prepare import Prepared, prepare
from fsdpctl.run.assets import collect_assets
from fsdpctl.run.directory import RunDirState, inspect_run_dir, prepare_run_dir
from fsdpctl.run.heartbeat import lock_run_dir
from fsdpctl.run.metrics import read_metrics
from fsdpctl.run.step_metrics import flops_per_token
from fsdpctl.training.worker import MEASURE_ONLY

_WARM_UP = 0.25  # share of the steps, whose times are ignored
_SHORT_STEPS = (
    "Steps shorter than 100 ms are limited by the host, which data sheets do not describe: such "
    "steps can take several times as long as predicted."
)


def measure(variants: Sequence[Variant], folder: Path, steps: int, *, is_kept: bool) -> None:
    """Run `steps` steps of every variant below `folder`; results so far survive an interruption."""
    estimator, starts = Estimator(), list[tuple[Variant, RunDirState, Mapping[str, bytes]]]()
    noted = dict[str, None]()
    for number, each in enumerate(variants, start=1):
        run_dir = folder / "runs" / f"{number:02d}"
        try:
            opened, state = _prepare(estimator, each, run_dir, steps)
        except UsageError as error:
            each.result.status = f"{REFUSED}{error}"
            continue
        note(*(line for line in opened.notes if line not in noted))
        noted |= dict.fromkeys(opened.notes)
        if each.plan is not None and each.result.status == OK:
            starts.append((each, state, collect_assets(each.plan.config, opened.data)))
    for number, (each, state, assets) in enumerate(starts, start=1):
        note(f"{number}/{len(starts)}  {each.result.label}")
        with doing(f"running {each.result.label}"):
            _run(each, state, assets)
        if each.result.status == OK and is_kept:
            each.result.run_dir = str(state.run_dir.relative_to(folder))


def _prepare(
    estimator: Estimator, variant: Variant, run_dir: Path, steps: int
) -> tuple[Prepared, RunDirState]:
    """Prepare a variant, resolve `auto` as `train` does, and estimate the memory.

    The number of steps is replaced after `prepare`, which may compute it from train.epochs.
    """
    values = {"train.run_dir": str(run_dir), "checkpoint.remote": None}
    opened = prepare(replace(variant.composed, config=variant.composed.config.changed(values)))
    config = opened.config.changed({"train.steps": steps}, Origin.TYPED)
    state = inspect_run_dir(fill_auto(config, Stage.MODULE), "auto")
    variant.plan, estimate, _ = resolve_auto_of_run(
        estimator, state.config, state.stored_config, state.stored_in, note
    )
    units, config = module_units(opened.module, classes=None), variant.plan.config
    sent = sent_per_step(config, units, variant.plan.batches.num_micro_batches)
    variant.result.strategy, variant.result.world_size = config.strategy.name, config.num_ranks
    variant.result.sent_bytes_per_step = sent.total
    _add_memory(variant.result, estimate)
    return opened, state


def _run(variant: Variant, state: RunDirState, assets: Mapping[str, bytes]) -> None:
    assert variant.plan is not None
    try:
        failure = run_briefly(state, variant.plan.config, variant.result.label, assets)
        if failure is not None:
            raise FsdpctlError(failure)
        _add_measured(variant.result, state.run_dir)
    except (InterruptError, StoppedError):
        raise
    except FsdpctlError as error:
        prefix = REFUSED if isinstance(error, UsageError) else FAILED
        variant.result.status = f"{prefix}{error}"


def _add_measured(row: VariantResult, run_dir: Path) -> None:
    """Add the medians of the metrics in `run_dir`; FsdpctlError if there are too few."""
    file = run_dir / METRICS
    steps = [line for line in read_metrics(file) if line.is_step]
    timed = steps[int(len(steps) * _WARM_UP) :]
    if len(timed) < 2:
        raise FsdpctlError(f"{file}: too few steps to measure their speed")
    seconds = median(line.seconds or 0.0 for line in timed)
    last, mfus = steps[-1], [line.mfu for line in timed if line.mfu is not None]
    on_device = last.peak_allocated_bytes is not None  # on a CPU, `reserved` is resident memory
    row.tokens_per_second = median(line.tokens_per_second or 0.0 for line in timed)
    row.step_seconds = seconds
    row.mfu = median(mfus) if len(mfus) == len(timed) else None
    row.peak_tensor_bytes = last.peak_allocated_bytes
    row.peak_reserved_bytes = last.peak_reserved_bytes if on_device else None
    row.final_loss = last.loss if isinstance(last.loss, float) else None
    times = [(x.seconds or 0.0, x.exposed_communication_seconds) for x in timed]
    row.exposed_communication_seconds = _exposed(seconds, times)


def _exposed(seconds: float, times: Sequence[tuple[float, float | None]]) -> float | None:
    """Return the exposed part of `seconds` by the share in `times` (step, exposed), if known."""
    exposed = [part for _, part in times if part is not None]
    total = sum(step for step, _ in times)
    return seconds * sum(exposed) / total if len(exposed) == len(times) else None


def run_briefly(
    state: RunDirState, config: Resolved, label: str, assets: Mapping[str, bytes]
) -> str | None:
    """Run the steps of a new run, without validation, checkpoints and samples.

    `config` is the resolved configuration of `state`; the run directory gets `label` and `assets`.
    Returns why the run failed. InterruptError after SIGINT, StoppedError after other stop signals.
    """
    lock = lock_run_dir(state.run_dir)
    try:
        prepare_run_dir(state, config, [label], assets)
        outcome = launch_workers([str(state.run_dir), MEASURE_ONLY], config.launch)
    finally:
        lock.release()
    if outcome.stop_signal == signal.SIGINT:
        raise InterruptError("interrupted before all variants had run")
    if outcome.stop_signal is not None:
        raise StoppedError("stopped before all variants had run")
    return None if outcome.cause is None else outcome.cause.description


def _add_memory(row: VariantResult, estimate: RunEstimate) -> None:
    """Add the estimated memory and the status; a variant that does not fit has no duration."""
    row.status = OK
    if shortages := estimate.shortages:
        row.status = f"{TOO_LARGE}{'; '.join(shortages)}"
        row.hours = row.gpu_hours = row.cost = None
    row.estimated_peak_tensor_bytes = estimate.allocated
    row.estimated_peak_reserved_bytes = estimate.peak_reserved
    row.memory_bytes = estimate.available


def predict(variants: Sequence[Variant]) -> Iterator[str]:
    """Predict all variants without running them; yield notes on the predictions, a line each."""
    estimator = Estimator()
    for each in variants:
        yield from notes_on_memory(each.composed.config)
        try:
            yield from _predict(estimator, each)
        except UsageError as error:
            each.result.status = f"{REFUSED}{error}"
    plans = [each.plan for each in variants if each.plan is not None]
    if plans and all(each.result.status != OK for each in variants):
        yield "no variant fits; settings with which the nearest variant fits:"
        nearest = max(plans, key=lambda plan: estimator.estimate(plan).margin)
        yield from describe_suggestions(suggest(estimator, nearest))
    if any((each.result.step_seconds or SHORT_STEP) < SHORT_STEP for each in variants):
        yield _SHORT_STEPS


def _predict(estimator: Estimator, variant: Variant) -> Iterator[str]:
    config = estimator.prepare(variant.composed).config
    if config.launch.device == "cpu":
        raise UsageError(
            "launch.device=cpu: --simulate predicts steps of GPUs; set cluster, or omit "
            "--simulate to measure the variants in runs"
        )
    estimate, ranking = resolve_auto(estimator, config)
    if ranking is not None and ranking.ranked:
        selected = "selected: " if ranking.defaults is None else ""  # else the summary has it
        yield f"{variant.result.label}: {selected}{ranking.summary}"
    variant.plan = plan = estimate.plan
    row = variant.result
    row.strategy = plan.config.strategy.name
    step, units = estimator.predict(plan), estimator.traced_model(plan.config).units
    time = run_time(estimator, estimate, step)
    notes = (time.length.unknown, time.length.error)  # texts, or empty
    yield from (*filter(None, notes), *time.notes)
    sent = sent_per_step(plan.config, units, estimate.batches.num_micro_batches)
    row.mfu, row.sent_bytes_per_step = _utilization(time.tokens_per_second, estimate), sent.total
    row.world_size, row.steps = time.num_ranks, time.length.steps
    row.tokens_per_second, row.error_band = time.tokens_per_second, time.band
    row.step_seconds, row.exposed_communication_seconds = step.seconds, step.exposed_communication
    row.price = time.price
    row.hours, row.gpu_hours, row.cost = map(time.totals.get, ("hours", "gpu_hours", "cost"))
    _add_memory(row, estimate)


def _utilization(speed: float, estimate: RunEstimate) -> float | None:
    config = estimate.config
    peak = device_of(config).peak_rates[Dtype(config.precision.param_dtype).itemsize]
    if estimate.num_trained < estimate.num_params:
        return None
    per_token = flops_per_token(config.model, estimate.num_active, config.train.seq_len)
    return per_token * speed / (peak * config.num_ranks)
