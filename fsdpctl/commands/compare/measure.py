"""Comparison of variants by measurement: each runs once, as `train` would run it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from fsdpctl.commands.compare.row import FAILED, OK, REFUSED, Row
from fsdpctl.commands.compare.simulate import with_memory
from fsdpctl.commands.compare.vary import Variant
from fsdpctl.commands.console import note
from fsdpctl.errors import FsdpctlError, InterruptError, StoppedError, UsageError
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.planned_steps import sent_in_step
from fsdpctl.io.activity import doing
from fsdpctl.io.run_files import METRICS
from fsdpctl.launch.begin import decide_run
from fsdpctl.launch.short_run import run_briefly
from fsdpctl.models.describe import divide_module
from fsdpctl.resolve.open import Opened, open_run
from fsdpctl.run.assets import collect_assets
from fsdpctl.run.directory import Look, look
from fsdpctl.run.metrics import read_metrics

_WARM_UP = 0.25  # share of the steps that are ignored


def measure(variants: Sequence[Variant], folder: Path, *, is_kept: bool) -> None:
    """Run every variant below `folder`; results so far remain if this is interrupted."""
    estimator, starts = Estimator(), list[tuple[Variant, Look, Mapping[str, bytes]]]()
    noted = dict[str, None]()
    for number, each in enumerate(variants, start=1):
        run_dir = folder / "runs" / f"{number:02d}"
        try:
            opened, seen = _prepare(estimator, each, run_dir)
        except UsageError as error:
            each.row = replace(each.row, status=f"{REFUSED}{error}")
            continue
        note(*(line for line in opened.notes if line not in noted))
        noted |= dict.fromkeys(opened.notes)
        if each.plan is not None and each.row.status == OK:
            starts.append((each, seen, collect_assets(each.plan.config, opened.data)))
    for number, (each, seen, assets) in enumerate(starts, start=1):
        note(f"{number}/{len(starts)}  {each.row.label}")
        with doing(f"running {each.row.label}"):
            _run(each, seen, assets)
        if each.row.status == OK and is_kept:
            each.row = replace(each.row, run_dir=str(seen.run_dir.relative_to(folder)))


def _prepare(estimator: Estimator, each: Variant, run_dir: Path) -> tuple[Opened, Look]:
    """Open a variant and decide what is `auto` as `train` does, and estimate it."""
    values = {"train.run_dir": str(run_dir), "checkpoint.remote": None}
    opened = open_run(replace(each.composed, config=each.composed.config.changed(values)))
    seen = look(opened.config, "auto")
    each.plan, estimate, _ = decide_run(opened, seen, estimator, note)
    units, config = divide_module(opened.module, None), each.plan.config
    row = replace(
        each.row,
        strategy=config.strategy.name,
        world_size=config.num_ranks,
        sent_bytes_per_step=sent_in_step(config, units, each.plan.batches.num_micro_batches).total,
    )
    each.row = with_memory(row, estimate)
    return opened, seen


def _run(each: Variant, seen: Look, assets: Mapping[str, bytes]) -> None:
    assert each.plan is not None
    try:
        failure = run_briefly(seen, each.plan.config, each.row.label, assets)
        if failure is not None:
            raise FsdpctlError(failure)
        each.row = measured(each.row, seen.run_dir)
    except (InterruptError, StoppedError):
        raise
    except FsdpctlError as error:
        kind = REFUSED if isinstance(error, UsageError) else FAILED
        each.row = replace(each.row, status=f"{kind}{error}")


def measured(row: Row, run_dir: Path) -> Row:
    """Return `row` with medians of the metrics in `run_dir`; FsdpctlError if there are too few."""
    file = run_dir / METRICS
    steps = [line for line in read_metrics(file) if line.is_step]
    timed = steps[int(len(steps) * _WARM_UP) :]
    if len(timed) < 2:
        raise FsdpctlError(f"{file}: too few steps to measure their speed")
    seconds = median(line.seconds or 0.0 for line in timed)
    last, mfus = steps[-1], [line.mfu for line in timed if line.mfu is not None]
    on_device = last.peak_allocated_bytes is not None
    return replace(
        row,
        tokens_per_second=median(line.tokens_per_second or 0.0 for line in timed),
        step_seconds=seconds,
        mfu=median(mfus) if len(mfus) == len(timed) else None,
        peak_tensor_bytes=last.peak_allocated_bytes,
        peak_reserved_bytes=last.peak_reserved_bytes if on_device else None,
        final_loss=last.loss if isinstance(last.loss, float) else None,
        exposed_communication_seconds=_exposed(
            seconds, [(x.seconds or 0.0, x.exposed_communication_seconds) for x in timed]
        ),
    )


def _exposed(seconds: float, times: Sequence[tuple[float, float | None]]) -> float | None:
    """Return the exposed part of a step, by its share in the sum of all; None if one is unknown."""
    known = [part for _, part in times if part is not None]
    total = sum(step for step, _ in times)
    return seconds * sum(known) / total if len(known) == len(times) else None
