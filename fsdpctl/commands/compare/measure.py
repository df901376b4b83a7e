"""Comparison of variants by measurement, in rounds of short runs.

Note: why rounds of complete runs. The speed of a machine drifts: it warms up, and other processes
use it. In every round each variant runs once, from the beginning and for all steps, and every
round begins with a different variant, so that this affects all variants alike. A run that is
resumed instead would have to write and read a checkpoint per turn, and would warm up again anyway.
Separate runs also show how much starts differ, and must end with the same loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from fsdpctl.commands.compare.row import FAILED, NOT_REACHED, OK, REFUSED, Round, Row
from fsdpctl.commands.compare.simulate import with_memory
from fsdpctl.commands.compare.vary import Variant
from fsdpctl.commands.console import note
from fsdpctl.config.auto import left_open
from fsdpctl.config.auto import opened as with_auto
from fsdpctl.errors import FsdpctlError, InterruptError, StoppedError, UsageError
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.planned_steps import estimate_run, sent_in_step
from fsdpctl.estimate.search import decide
from fsdpctl.io.activity import doing
from fsdpctl.io.run_files import METRICS
from fsdpctl.launch.probe import short_run
from fsdpctl.models.describe import divide_module
from fsdpctl.plan.strategy import FSDPCTL
from fsdpctl.resolve.data import notes_on_data
from fsdpctl.resolve.open import Opened, open_run
from fsdpctl.resolve.settle import RunPlan, settle
from fsdpctl.run.assets import collect_assets
from fsdpctl.run.environment import StartRecord, read_records
from fsdpctl.run.metrics import read_metrics

T = TypeVar("T")
RUN_FOLDER = "runs"  # in the directory of a comparison
_WARM_UP = 0.25  # share of the steps that are ignored
_PEAKS = ("peak_engine_bytes", "peak_tensor_bytes", "peak_reserved_bytes")


class MeasuredComparison:
    """A comparison by runs; its results are available at any time, also after an exception."""

    def __init__(
        self, variants: Sequence[Variant], folder: Path, *, num_rounds: int, is_kept: bool
    ) -> None:
        """Prepare a comparison in an existing directory without running anything."""
        self._folder, self._num_rounds, self._is_kept = folder, num_rounds, is_kept
        self._estimator = Estimator()
        self.variants = list(variants)
        self._assets: dict[str, Mapping[str, bytes]] = {}  # by label

    @property
    def rows(self) -> list[Row]:
        """A row for each variant, in their order."""
        rows = [each.row for each in self.variants]
        for number, row in enumerate(rows):
            if row.status == OK and not row.rounds:
                rows[number] = replace(row, status=NOT_REACHED)
        return [summarized(row) for row in rows]

    def run(self) -> None:
        """Run every variant in every round; those that fail are skipped in later rounds."""
        for each in self.variants:
            self._prepare(each)
        for number in range(self._num_rounds):
            running = [each for each in self.variants if each.row.status == OK]
            for count, each in enumerate(in_turn(running, number, self._num_rounds), start=1):
                turn = f"round {number + 1}/{self._num_rounds}  {count}/{len(running)}"
                note(f"{turn}  {each.row.label}")
                with doing(f"running {each.row.label}"):
                    self._run_once(each, number)

    def _prepare(self, each: Variant) -> None:
        try:
            opened = open_run(each.composed)
            plan = self._plan(opened)
            about_data = notes_on_data(opened.config, opened.data)
            if differs := [each for each in opened.notes if each not in about_data]:
                raise UsageError(differs[0])  # the run would differ from the requested variant
        except UsageError as error:
            each.row = replace(each.row, status=f"{REFUSED}{error}")
            return
        each.plan = plan
        each.row = self._estimated(each.row, opened, plan)
        self._assets[each.row.label] = collect_assets(plan.config, opened.data)

    def _plan(self, opened: Opened) -> RunPlan:
        config = opened.config
        try:
            _, ranking = decide(self._estimator, config, opened.unset)
        except UsageError:
            if left_open(config):
                raise
            ranking = None  # the estimate does not support it, but it may run
        if ranking is None:
            return settle(config)
        return settle(with_auto(config, ranking.names), ranking.selection)

    def _estimated(self, row: Row, opened: Opened, plan: RunPlan) -> Row:
        config = plan.config
        units, passes = divide_module(opened.module, None), plan.batches.num_micro_batches
        row = replace(
            row,
            strategy=config.strategy.name,
            world_size=config.num_ranks,
            sent_bytes_per_step=sent_in_step(config, units, passes).total,
        )
        if config.engine.name == FSDPCTL:
            engine = estimate_run(config, opened.module, passes)
            row = replace(row, estimated_peak_engine_bytes=engine.peak_bytes)
        try:
            return with_memory(row, self._estimator.estimate(plan))
        except UsageError:
            return row  # the estimate does not support it, but it may run

    def _run_once(self, each: Variant, number: int) -> None:
        place = self.variants.index(each) + 1
        run_dir = self._folder / RUN_FOLDER / f"{place:02d}" / f"round-{number + 1}"
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        assert each.plan is not None
        config = each.plan.config
        config = replace(config, train=replace(config.train, run_dir=str(run_dir)))
        kept = str(run_dir.relative_to(self._folder)) if self._is_kept else None
        try:
            label = each.row.label
            failure = short_run(config, label, self._assets[label], "all variants had run")
            if failure is None:
                rounds = (*each.row.rounds, round_of(run_dir, kept))
                each.row = replace(each.row, rounds=rounds)
                return
        except (InterruptError, StoppedError):
            raise
        except UsageError as error:
            each.row = replace(each.row, status=f"{REFUSED}{error}")
            return
        except FsdpctlError as error:
            failure = str(error)
        later = f"in round {number + 1}, " if number else ""
        each.row = replace(each.row, status=f"{FAILED}{later}{failure}")


def in_turn(variants: Sequence[T], number: int, num_rounds: int) -> list[T]:
    """Return the order in a round; as far as possible, each begins with a different variant."""
    first = number * max(len(variants) // num_rounds, 1) % max(len(variants), 1)
    return [*variants[first:], *variants[:first]]


def round_of(run_dir: Path, kept: str | None) -> Round:
    """Summarize the metrics of the run in `run_dir`, kept as `kept`; FsdpctlError if too few."""
    file = run_dir / METRICS
    steps = [line for line in read_metrics(file) if line.is_step]
    timed = steps[int(len(steps) * _WARM_UP) :]
    if len(timed) < 2:
        raise FsdpctlError(f"{file}: too few steps to measure their speed")
    step_seconds = median(line.seconds or 0.0 for line in timed)
    last = steps[-1]
    on_device = last.peak_allocated_bytes is not None
    return Round(
        run_dir=kept,
        tokens_per_second=median(line.tokens_per_second or 0.0 for line in timed),
        step_seconds=step_seconds,
        mfu=_median([line.mfu for line in timed]),
        peak_engine_bytes=next(reversed(read_records(run_dir)), StartRecord()).peak_engine_bytes,
        peak_tensor_bytes=last.peak_allocated_bytes,
        peak_reserved_bytes=last.peak_reserved_bytes if on_device else None,
        final_loss=last.loss if isinstance(last.loss, float) else None,
        exposed_communication_seconds=_exposed(
            step_seconds, [(x.seconds or 0.0, x.exposed_communication_seconds) for x in timed]
        ),
    )


def summarized(row: Row) -> Row:
    """Summarize the rounds of a variant, if it has any."""
    rounds = row.rounds
    if not rounds:
        return row
    speeds = [each.tokens_per_second for each in rounds]
    step_seconds = median(each.step_seconds for each in rounds)
    exposed = [(each.step_seconds, each.exposed_communication_seconds) for each in rounds]
    peaks: dict[str, Any] = {
        name: max((x for each in rounds if (x := getattr(each, name)) is not None), default=None)
        for name in _PEAKS
    }
    return replace(
        row,
        tokens_per_second=median(speeds),
        tokens_per_second_spread=(min(speeds), max(speeds)) if len(rounds) > 1 else None,
        step_seconds=step_seconds,
        exposed_communication_seconds=_exposed(step_seconds, exposed),
        mfu=_median([each.mfu for each in rounds]),
        final_loss=rounds[0].final_loss,
        **peaks,
    )


def _exposed(seconds: float, times: Sequence[tuple[float, float | None]]) -> float | None:
    """Return the exposed part of a step, by its share in the sum of all; None if one is unknown."""
    known = [part for _, part in times if part is not None]
    total = sum(step for step, _ in times)
    return seconds * sum(known) / total if len(known) == len(times) else None


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median, or None unless all values are known."""
    known = [value for value in values if value is not None]
    return median(known) if len(known) == len(values) else None
