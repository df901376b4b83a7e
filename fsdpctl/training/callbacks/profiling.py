"""Traces of steps, in which units and collectives have names."""

import warnings
from pathlib import Path

from torch.profiler import profile, schedule

from fsdpctl.io.run_files import PROFILE, PROFILES
from fsdpctl.training.requests import RequestFlags
from fsdpctl.training.train_step import TrainedModel
from fsdpctl.training.trainer import Callback, Trainer

_TRACED_STEPS = 3
# The first step creates optimizer states, and the second one starts the tracer.
_SKIPPED_STEPS_AT_START = 2
_SKIPPED_STEPS = 1


class Profiling(Callback):
    """A callback that traces three steps, at the start or on request, into a file per rank.

    https://ui.perfetto.dev and chrome://tracing show `profile/from-step-S-rank-N.json`; S: the
    last step before the skipped steps.
    """

    def __init__(self, model: TrainedModel, run_dir: Path, rank: int, *, at_start: bool) -> None:
        """Write traces into `run_dir`; if `at_start`, trace the first steps without a request."""
        self._model, self._rank, self._at_start = model, rank, at_start
        self._folder = run_dir / PROFILES
        self._profile: profile | None = None
        self._is_written = False

    def begin(self, trainer: Trainer) -> None:
        if self._at_start:
            self._start(trainer, _SKIPPED_STEPS_AT_START)

    def after_launch(self, trainer: Trainer) -> None:
        """Count a step of the trace; end the trace on all ranks after its file is written."""
        if self._profile is None:
            return
        self._profile.step()
        if self._is_written:  # on_trace_ready was called
            self.end(trainer, error=None)
            trainer.collectives.barrier()  # remove PROFILE after all ranks have written their files
            trainer.requests.clear(PROFILE)

    def act(self, trainer: Trainer, requested: RequestFlags) -> RequestFlags:
        if requested.profile and not trainer.is_traced and trainer.step < trainer.total_steps:
            self._start(trainer, _SKIPPED_STEPS)
        return requested

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """End a trace; if it is in progress, write the traced part."""
        if self._profile is not None:
            self._profile.stop()
            self._model.name_ranges(is_on=False)
        self._profile, self._is_written, trainer.is_traced = None, False, False

    def _start(self, trainer: Trainer, skipped: int) -> None:
        """Skip `skipped` steps, then trace three; if fewer steps remain, skip none."""
        self._model.name_ranges(is_on=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"from-step-{trainer.step}-rank-{self._rank}.json"
        file.unlink(missing_ok=True)

        def write(traced: profile) -> None:
            traced.export_chrome_trace(str(file))
            self._is_written = True

        steps = trainer.total_steps - trainer.step
        num_skipped = skipped if steps >= skipped + _TRACED_STEPS else 0
        active = min(_TRACED_STEPS, steps - num_skipped)
        # The last skipped step is the warm-up; torch warns about a schedule without one.
        warmup = min(num_skipped, 1)
        with warnings.catch_warnings(action="ignore"):
            rule = schedule(wait=num_skipped - warmup, warmup=warmup, active=active, repeat=1)
        self._profile = profile(schedule=rule, on_trace_ready=write)
        self._profile.start()
        trainer.is_traced = True
