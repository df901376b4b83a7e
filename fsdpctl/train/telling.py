"""All that is told of a run: figures to metrics.jsonl, words to the screen and the log."""

from types import TracebackType
from typing import Any, Self

from fsdpctl.optim.record import StepFigures
from fsdpctl.run.directory import LOG, METRICS
from fsdpctl.run.flops import model_flops
from fsdpctl.run.metrics import MetricsFile, StepMetrics, peak_memory
from fsdpctl.run.progress import RunProgress
from fsdpctl.train.parts import LaunchedStep, TrainingParts
from fsdpctl.train.restart import restart_of
from fsdpctl.train.time_check import TimeCheck


class Teller:
    """Tells; on all ranks but 0 it is silent."""

    def __init__(self, parts: TrainingParts, step: int) -> None:
        """Of a run that begins after `step` steps.

        Raises:
            UsageError: metrics.jsonl is damaged, or cannot be written.
        """
        config, ranks = parts.config, parts.model.collectives
        assert config.train.steps is not None
        is_main = ranks.rank == 0
        self._watch, file = parts.watch, parts.run_dir / METRICS
        self.metrics = MetricsFile(file, step, parts.watch.line) if is_main else None
        self.shown = RunProgress(
            config.train.steps,
            step,
            log_every=config.train.log_every,
            shows=is_main and parts.shows,
            log=parts.run_dir / LOG,
        )
        self._time = TimeCheck(parts.run_dir) if is_main and parts.shows else None
        self._restart = restart_of()
        self._device = parts.device
        self._num_ranks = ranks.size
        self._flops = model_flops(config, parts.model.module, parts.device, ranks.size)

    def __enter__(self) -> Self:
        self.shown.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shown.__exit__(kind, error, trace)

    def say(self, line: str) -> None:
        """In words."""
        self.shown.say(line)

    def write(self, line: dict[str, Any]) -> None:
        """In figures.

        Raises:
            FsdpctlError: the disk is full, or gone.
        """
        if self.metrics is not None:
            self.metrics.write(line)

    def step(self, done: LaunchedStep, figures: StepFigures, share_saved: float | None) -> float:
        """Of a step that is done; of a checkpoint on its way so much is written.

        Returns the seconds that it took; waits for the device if it has to.
        """
        memory, times = peak_memory(self._device), done.clock.times()
        about = (done.step, done.samples, done.tokens, figures, done.lr, times, memory)
        metrics = StepMetrics(*about, self._flops, self._num_ranks)
        self.write(metrics.to_line())
        self._tell_restart(done.step)
        self.shown.step(metrics, share_saved)
        if self._time is not None and (told := self._time.after(times.total)):
            said, figures_of_it = told
            self.say(said)
            self.write({"step": done.step, **figures_of_it})
        return times.total

    def _tell_restart(self, step: int) -> None:
        """What it cost that ranks were started again, once the first step is done."""
        restart, self._restart = self._restart, None
        if restart is not None:
            line = restart.to_line(step)
            self.write(line)
            seconds = line["restart"]["seconds_to_next_step"]
            self.say(f"step {step}: trained again {seconds:.1f} s after the failure")

    def cut_back(self, step: int) -> None:
        """Forget the figures after `step`, but for those of steps that were not applied.

        Raises:
            FsdpctlError: the disk is full, or gone.
        """
        if self.metrics is not None:
            self.metrics.cut_back(step)
            self._watch.cut_back(step)

    def close(self) -> None:
        """There is nothing more in figures."""
        if self.metrics is not None:
            self.metrics.close()
