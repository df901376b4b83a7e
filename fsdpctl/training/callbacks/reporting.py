"""The reports of a run: metrics, cost of a restart, estimated and measured values, warnings."""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from fsdpctl.data.mixture import MixedSamples
from fsdpctl.io.texts import format_bytes, one_line
from fsdpctl.run.environment import Restart, SavedEstimate, read_estimate
from fsdpctl.run.step_metrics import StepMetrics, finite, peak_memory
from fsdpctl.training.callbacks.checkpoints import Checkpoints
from fsdpctl.training.journal import Journal
from fsdpctl.training.requests import RequestFlags
from fsdpctl.training.trainer import Callback, Trainer, ends_together

_COMPARED_STEPS = 3  # the first one compiles, and all allocate
RESTART_VARIABLE = "FSDPCTL_RESTART"  # in the environment: the restart that started this worker


class EstimateReport(Callback):
    """A callback that compares the first steps' time and peak memory with the estimate.

    CPU processes report their peak memory after the last step.
    """

    def __init__(self, run_dir: Path, first_step: int) -> None:
        """Compare with the estimate in `run_dir` after three steps from `first_step` on."""
        self._estimate = read_estimate(run_dir)
        self._checked_step = first_step + _COMPARED_STEPS
        self._seconds: list[float] = []

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        if len(self._seconds) < _COMPARED_STEPS:
            self._seconds.append(metrics.times.total)
            if len(self._seconds) == _COMPARED_STEPS and (report := self.time_report()) is not None:
                message, values = report
                trainer.journal.remark(message)
                trainer.journal.update_start_record(values)

    def time_report(self) -> tuple[str, dict[str, Any]] | None:
        """Return a message about the step time, and its values; None without a prediction."""
        estimate = self._estimate
        if estimate is None or estimate.predicted_step_seconds is None:
            return None
        predicted, measured = estimate.predicted_step_seconds, median(self._seconds[1:])
        details = f"{_deviation(predicted, measured)}; {estimate.prediction_source}"
        message = f"step time: {measured:.3g} s measured, {predicted:.3g} s predicted ({details})"
        return message, {"step_seconds": measured, "predicted_step_seconds": predicted}

    def act(self, trainer: Trainer, requested: RequestFlags) -> RequestFlags:
        if trainer.step == self._checked_step and trainer.parts.device.type == "cuda":
            memory = peak_memory(trainer.parts.device)
            peaks_of_rank = (memory.allocated or 0, memory.reserved)
            gathered = trainer.collectives.all_gather_values(peaks_of_rank)
            allocated, reserved = map(max, zip(*gathered, strict=True))
            peaks = {"peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved}
            trainer.journal.update_start_record(peaks)
            if self._estimate is not None:
                trainer.journal.remark(_compared_peaks(peaks, self._estimate))
        return requested

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """After the last step, record and print the peak memory of CPU processes."""
        if error is None and trainer.parts.device.type == "cpu":
            memory = peak_memory(trainer.parts.device)
            resident = max(trainer.collectives.all_gather_values(memory.reserved))
            trainer.journal.update_start_record({"peak_resident_bytes": resident})
            trainer.journal.remark(self.memory_report(resident))

    def memory_report(self, resident: int) -> str:
        """Return a message about the memory of a CPU process and its estimate."""
        text = f"memory: {format_bytes(resident)} per process, with Python and its libraries"
        if self._estimate is None:
            return text
        return f"{text}; {format_bytes(self._estimate.peak_reserved_bytes)} estimated for tensors"


def _compared_peaks(peaks: Mapping[str, int], estimate: SavedEstimate) -> str:
    texts = []
    for name in ("allocated", "reserved"):
        measured, estimated = peaks[f"peak_{name}_bytes"], getattr(estimate, f"peak_{name}_bytes")
        comparison = "equal to the estimate"
        if measured != estimated:
            deviation = _deviation(estimated, measured, digits=1)
            comparison = f"{format_bytes(estimated)} estimated ({deviation})"
        texts.append(f"{format_bytes(measured)} {name} peak, {comparison}")
    return f"memory: {'; '.join(texts)}"


def _deviation(expected: float, measured: float, digits: int = 0) -> str:
    excess = expected / measured - 1 if measured else 0.0
    return f"{abs(excess):.{digits}%} {'above' if excess >= 0 else 'below'} measured"


class RunReporter(Callback):
    """The metrics of each step, the progress bar, and the cost of a restart."""

    def __init__(self, journal: Journal, checkpoints: Checkpoints | None) -> None:
        self._journal, self._checkpoints = journal, checkpoints
        text = os.environ.get(RESTART_VARIABLE)
        self._restart = msgspec.json.decode(text, type=Restart) if text else None

    def begin(self, trainer: Trainer) -> None:
        self._journal.display.start(compiles=trainer.parts.config.train.compile)

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Write and show the metrics; after the first step, report the cost of a restart."""
        samples, line = trainer.parts.train_batches.samples, metrics.to_line()
        if not isinstance(samples, MixedSamples):
            self._journal.write_metrics(line)
        else:
            losses = zip(samples.sources, metrics.stats.source_losses, strict=False)
            by_source = {f"loss/{x.name}": finite(loss) for x, loss in losses if loss is not None}
            self._journal.write_metrics(line | by_source | samples.to_line(metrics.samples))
            size = trainer.parts.config.train.global_batch_size
            for text in samples.new_epochs(metrics.samples - size, metrics.samples):
                self._journal.remark(f"step {metrics.step}: {text}")
        restart, self._restart = self._restart, None
        if restart is not None:
            seconds = round(time.time() - restart.failed_at, 3)
            restart = replace(restart, step=metrics.step, seconds_to_next_step=seconds)
            self._journal.update_start_record({"restart": asdict(restart)})
            text = f"first completed step, {seconds:.1f} s after the failure"
            self._journal.say(f"step {metrics.step}: {text}")
        fraction = None if self._checkpoints is None else self._checkpoints.fraction_written
        self._journal.display.step(metrics, fraction)

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        self._journal.display.stop(is_complete=error is None)
        self._journal.close_trackers(succeeded=ends_together(error))


class CompilerReport(Callback, logging.Handler):
    """A callback that warns once if torch.compile leaves a function uncompiled.

    Dynamo only writes a log message, and fsdpctl removes the log of a rank that succeeds.
    """

    _LOGGER = logging.getLogger("torch._dynamo.convert_frame")

    def __init__(self, journal: Journal) -> None:
        logging.Handler.__init__(self, logging.WARNING)
        self._journal: Journal | None = journal

    def begin(self, trainer: Trainer) -> None:
        self._LOGGER.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Print the reason in Dynamo's log message as a warning, without Dynamo's advice."""
        journal, self._journal = self._journal, None
        if journal is not None:
            reason, *_ = record.getMessage().partition("\nTo ")
            line = one_line(" ".join(reason.split()))
            journal.warn(f"train.compile=true: a function runs uncompiled from now on: {line}")

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        self._LOGGER.removeHandler(self)
