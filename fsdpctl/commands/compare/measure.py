"""Comparison of variants by measurement: each runs once, as `train` would run it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from fsdpctl.commands.compare.row import FAILED, NOT_REACHED, OK, REFUSED, Row
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
from fsdpctl.resolve.open import open_run
from fsdpctl.run.assets import collect_assets
from fsdpctl.run.directory import Look, look
from fsdpctl.run.metrics import read_metrics

RUN_FOLDER = "runs"  # in the directory of a comparison
_WARM_UP = 0.25  # share of the steps that are ignored


class MeasuredComparison:
    """A comparison by runs; its results are available at any time, also after an exception."""

    def __init__(self, variants: Sequence[Variant], folder: Path, *, is_kept: bool) -> None:
        """Prepare a comparison in an existing directory without running anything."""
        self._folder, self._is_kept = folder, is_kept
        self._estimator = Estimator()
        self.variants = list(variants)
        self._seen: dict[str, tuple[Look, Mapping[str, bytes]]] = {}  # by label, with the assets
        self._noted: set[str] = set()

    @property
    def rows(self) -> list[Row]:
        """A row for each variant, in their order."""
        rows = [each.row for each in self.variants]
        return [
            replace(row, status=NOT_REACHED) if row.status == OK and not row.speed else row
            for row in rows
        ]

    def run(self) -> None:
        """Run every variant."""
        for number, each in enumerate(self.variants, start=1):
            self._prepare(each, self._folder / RUN_FOLDER / f"{number:02d}")
        running = [each for each in self.variants if each.row.status == OK]
        for number, each in enumerate(running, start=1):
            note(f"{number}/{len(running)}  {each.row.label}")
            with doing(f"running {each.row.label}"):
                self._run(each)

    def _prepare(self, each: Variant, run_dir: Path) -> None:
        """Open a variant and decide what is `auto` as `train` does, and estimate it."""
        values = {"train.run_dir": str(run_dir), "checkpoint.remote": None}
        composed = replace(each.composed, config=each.composed.config.changed(values))
        try:
            opened = open_run(composed)
            seen = look(opened.config, "auto")
            plan, estimate, _ = decide_run(opened, seen, self._estimator, note)
        except UsageError as error:
            each.row = replace(each.row, status=f"{REFUSED}{error}")
            return
        note(*(line for line in opened.notes if line not in self._noted))
        self._noted.update(opened.notes)
        units, config = divide_module(opened.module, None), plan.config
        row = replace(
            each.row,
            strategy=config.strategy.name,
            world_size=config.num_ranks,
            sent_bytes_per_step=sent_in_step(config, units, plan.batches.num_micro_batches).total,
        )
        each.plan, each.row = plan, with_memory(row, estimate)
        self._seen[row.label] = seen, collect_assets(config, opened.data)

    def _run(self, each: Variant) -> None:
        assert each.plan is not None
        seen, assets = self._seen[each.row.label]
        try:
            failure = run_briefly(seen, each.plan.config, each.row.label, assets)
            if failure is None:
                kept = str(seen.run_dir.relative_to(self._folder)) if self._is_kept else None
                each.row = replace(measured(each.row, seen.run_dir), run_dir=kept)
                return
        except (InterruptError, StoppedError):
            raise
        except UsageError as error:
            each.row = replace(each.row, status=f"{REFUSED}{error}")
            return
        except FsdpctlError as error:
            failure = str(error)
        each.row = replace(each.row, status=f"{FAILED}{failure}")


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
