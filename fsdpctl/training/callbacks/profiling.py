"""Traces of steps, in which units and collectives have names."""

import warnings
from pathlib import Path

from torch.profiler import profile, schedule

from fsdpctl.io.run_files import PROFILE, PROFILES
from fsdpctl.training.requests import RequestFlags
from fsdpctl.training.train_step import TrainedModel
from fsdpctl.training.trainer import Callback, Trainer

_TRACED_STEPS = 3  # steps
_SKIPPED_STEPS_AT_START = (
    2  # at a start: the first creates optimizer states, the second starts the tracer
)
_SKIPPED_STEPS = 1


class Profiling(Callback):
    """Traces at the start of a run or on request, each in new files, one per rank.

    They are `profile/from-step-S-rank-N.json`, for https://ui.perfetto.dev and chrome://tracing.
    """

    def __init__(
        self, model: TrainedModel, run_dir: Path, rank: int, *, at_start: bool = False
    ) -> None:
        """Trace into `run_dir`; with `at_start` also without a request."""
        self._model, self._rank, self._at_start = model, rank, at_start
        self._folder = run_dir / PROFILES
        self._profile: profile | None = None
        self._is_written = False

    def begin(self, run: Trainer) -> None:
        if self._at_start:
            self._start(run, _SKIPPED_STEPS_AT_START)

    def after_launch(self, run: Trainer) -> None:
        """Count a step of the trace; once it is written, end it on all ranks."""
        if self._profile is None:
            return
        self._profile.step()
        if self._is_written:
            self.end(run, None)
            run.ranks.barrier()  # the files of the other ranks are complete too
            run.requests.clear(PROFILE)

    def act(self, run: Trainer, requested: RequestFlags) -> RequestFlags:
        if requested.profile and not run.is_traced and run.step < run.total_steps:
            self._start(run, _SKIPPED_STEPS)
        return requested

    def end(self, run: Trainer, error: BaseException | None) -> None:
        """End a trace; of one in progress, write the part that exists."""
        if self._profile is not None:
            self._profile.stop()
            self._model.name_ranges(is_on=False)
        self._profile, self._is_written, run.is_traced = None, False, False

    def _start(self, run: Trainer, skipped: int) -> None:
        """Trace three steps after `skipped` ones, or all remaining steps if there are too few."""
        self._model.name_ranges(is_on=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"from-step-{run.step}-rank-{self._rank}.json"
        file.unlink(missing_ok=True)

        def write(traced: profile) -> None:
            traced.export_chrome_trace(str(file))
            self._is_written = True

        steps = run.total_steps - run.step
        first = skipped if steps >= skipped + _TRACED_STEPS else 0
        with warnings.catch_warnings(action="ignore"):  # of a trace that begins at once
            active = min(_TRACED_STEPS, steps - first)
            rule = schedule(wait=max(first - 1, 0), warmup=min(first, 1), active=active, repeat=1)
        self._profile = profile(schedule=rule, on_trace_ready=write)
        self._profile.start()
        run.is_traced = True
