"""The reports of a run: metrics, its heartbeat, the cost of a restart, and its first steps."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from fsdpctl.comm.collectives import ObjectExchange
from fsdpctl.data.mixture import MixedRows
from fsdpctl.io import files
from fsdpctl.io.run_files import HEARTBEAT
from fsdpctl.io.units import format_bytes
from fsdpctl.run.environment import read_estimate
from fsdpctl.run.heartbeat import ENDED, FAILED, INTERVAL, STOPPED, HeartbeatRecord
from fsdpctl.run.step_metrics import StepMetrics, finite, peak_memory, proportional_memory
from fsdpctl.training.callback import Callback, TrainingRun, is_joint
from fsdpctl.training.callbacks.checkpoints import Checkpoints
from fsdpctl.training.journal import Journal
from fsdpctl.training.requests import RequestFlags
from fsdpctl.training.step import Optimizer, TrainedModel

_STEPS = 3  # the first of which compiles and allocates; then the allocator has its size
RESTART = "FSDPCTL_RESTART"  # in the environment
_LONGEST = 2000  # characters of a message


class Checks(Callback):
    """One line about memory and one about time, once the first steps are completed."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        """Compare with the estimate in `run_dir` after three steps from `first_step` on."""
        self._run_dir, self._estimate = run_dir, read_estimate(run_dir)
        self._at = first_step + _STEPS
        self._seconds: list[float] = []

    def step(self, run: TrainingRun, done: StepMetrics) -> None:
        if len(self._seconds) < _STEPS:
            self._seconds.append(done.times.total)
            if len(self._seconds) == _STEPS and (found := self.time()) is not None:
                run.journal.remark(found[0])
                run.journal.write({"step": done.step, **found[1]})

    def time(self) -> tuple[str, dict[str, Any]] | None:
        """Return a message about the step time, and its values; None without a prediction."""
        estimate = self._estimate
        if estimate is None or estimate.predicted_step_seconds is None:
            return None
        predicted, measured = estimate.predicted_step_seconds, median(self._seconds[1:])
        source = estimate.prediction_source
        message = (
            f"step time: {measured:.3g} s measured, {predicted:.3g} s predicted "
            f"({_deviation(predicted, measured)}; {source})"
        )
        return message, {
            "step_seconds": measured,
            "predicted_step_seconds": predicted,
            "prediction_source": source,
        }

    def act(self, run: TrainingRun, requested: RequestFlags) -> RequestFlags:
        if run.step == self._at:
            self._at = -1
            memory = peak_memory(run.parts.device)
            engine = engine_bytes(run.parts.model, run.parts.optimizer)
            on_cpu = run.parts.device.type == "cpu"
            physical = proportional_memory() if on_cpu else 0
            own = (engine or 0, memory.allocated or 0, memory.reserved, physical)
            largest = [max(values) for values in zip(*run.ranks.gather_objects(own), strict=True)]
            if (found := self.memory(engine is not None, on_cpu, largest)) is not None:
                run.journal.remark(found[0])
                run.journal.write({"step": run.step, **found[1]})
        return requested

    def memory(
        self, has_engine: bool, on_cpu: bool, largest: Sequence[int]
    ) -> tuple[str, dict[str, int]] | None:
        """Return a message about peak memory, and its values; None without an estimate of it."""
        estimate, (engine, allocated, reserved, proportional) = self._estimate, largest
        if estimate is None:
            return None
        if not on_cpu:
            known = estimate.peak_allocated_bytes, estimate.peak_reserved_bytes
            texts = [
                _compared(allocated, "allocated peak", known[0]),
                _compared(reserved, "reserved peak", known[1]),
            ]
            return f"memory: {'; '.join(texts)}", {
                "fullest_allocated_bytes": allocated,
                "estimated_allocated_bytes": known[0],
                "fullest_reserved_bytes": reserved,
                "estimated_reserved_bytes": known[1],
            }
        if not has_engine or estimate.peak_engine_bytes is None:
            return None
        total = format_bytes(estimate.peak_allocated_bytes)
        what = _compared(engine, "engine peak", estimate.peak_engine_bytes)
        process = f"processes at most {format_bytes(reserved)} resident"
        if proportional:
            process += f", {format_bytes(proportional)} proportional"
        return f"memory: {what}; {total} estimated for all tensors; {process}", {
            "fullest_engine_bytes": engine,
            "estimated_engine_bytes": estimate.peak_engine_bytes,
            "fullest_resident_bytes": reserved,
            "fullest_proportional_bytes": proportional,
        }


def engine_bytes(model: TrainedModel, optimizer: Optimizer) -> int | None:
    """Return the peak memory of this rank's engine and optimizer, or None if not counted."""
    peak = model.peak_memory_bytes()
    on_host = model.host is not None  # and so are its states
    return peak if peak is None or on_host else peak + optimizer.memory_bytes()


def _compared(measured: int, what: str, estimated: int) -> str:
    text = f"{format_bytes(measured)} {what}"
    if measured == estimated:
        return f"{text}, equal to the estimate"
    return f"{text}, {format_bytes(estimated)} estimated ({_deviation(estimated, measured, 1)})"


def _deviation(expected: float, measured: float, digits: int = 0) -> str:
    off = expected / measured - 1 if measured else 0.0
    return f"{abs(off):.{digits}%} {'above' if off >= 0 else 'below'} measured"


@dataclass(frozen=True, slots=True)
class Restart:
    """The cause and the cost of a restart."""

    number: int
    reason: str
    failed_at: float  # seconds since the epoch
    lost_steps: int  # completed before, and to be repeated

    def to_text(self) -> str:
        """Return the value for the environment of the workers."""
        return msgspec.json.encode(self).decode()

    def to_line(self, step: int) -> dict[str, Any]:
        seconds = round(time.time() - self.failed_at, 3)
        return {"step": step, "restart": {**asdict(self), "seconds_to_next_step": seconds}}


class RunReporter(Callback):
    """The metrics of each step, the progress bar, and the peak memory of the engine."""

    def __init__(self, journal: Journal, checkpoints: Checkpoints | None) -> None:
        self._journal, self._checkpoints = journal, checkpoints
        text = os.environ.get(RESTART)  # of the restart that started this worker
        self._restart = msgspec.json.decode(text, type=Restart) if text else None

    def begin(self, run: TrainingRun) -> None:
        self._journal.progress.start(compiles=run.parts.config.train.compile)

    def step(self, run: TrainingRun, done: StepMetrics) -> None:
        """Write and show the metrics; after the first step also what a restart cost."""
        rows, line = run.parts.train_batches.rows, done.to_line()
        if not isinstance(rows, MixedRows):
            self._journal.write(line)
        else:
            losses = zip(rows.parts, done.figures.source_losses, strict=False)
            by_source = {f"loss/{x.name}": finite(loss) for x, loss in losses if loss is not None}
            self._journal.write(line | by_source | rows.to_line(done.samples))
            size = run.parts.config.train.global_batch_size
            for text in rows.begun(done.samples - size, done.samples):
                self._journal.remark(f"step {done.step}: {text}")
        restart, self._restart = self._restart, None
        if restart is not None:
            about = restart.to_line(done.step)
            self._journal.write(about)
            seconds = about["restart"]["seconds_to_next_step"]
            text = f"first completed step, {seconds:.1f} s after the failure"
            self._journal.say(f"step {done.step}: {text}")
        share = None if self._checkpoints is None else self._checkpoints.share_written
        self._journal.progress.step(done, share)

    def end(self, run: TrainingRun, error: BaseException | None) -> None:
        """Stop the bar and loggers; after the last step, record peak memory of the fullest rank."""
        self._journal.progress.stop()
        self._journal.loggers.close(well=is_joint(error))
        if error is None:
            own = engine_bytes(run.parts.model, run.parts.optimizer)
            peaks = [each for each in run.ranks.gather_objects(own) if each is not None]
            peak = max(peaks) if len(peaks) == run.ranks.size else None
            self._journal.write({"step": run.step, "peak_engine_bytes": peak})


class Heartbeat(Callback):
    """A thread of rank 0 that writes heartbeat.json until the process ends, whatever training does.

    A failure to write is ignored: readers then see the age of the last heartbeat.
    """

    def __init__(
        self, run_dir: Path, ranks: ObjectExchange, *, is_on: bool = True, every: float = INTERVAL
    ) -> None:
        """Write the first heartbeat and start the thread, if this rank `is_on`."""
        self._path, self._ranks, self._is_on, self._every = run_dir / HEARTBEAT, ranks, is_on, every
        self._record = HeartbeatRecord(socket.gethostname(), os.getpid(), time.time())
        self._first: tuple[int, float] | None = None  # the first step, and when it was completed
        self._has_ended = threading.Event()
        self._writing = threading.Lock()
        if is_on:
            self._write()
            threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def step(self, run: TrainingRun, done: StepMetrics) -> None:
        step, now = done.step, time.monotonic()
        is_first = self._first is None
        if self._first is None:
            self._first = step, now
        first, began = self._first
        each = (now - began) / (step - first) if step > first else None
        self._record = replace(self._record, step=step, seconds_per_step=each)
        if is_first:  # readers shall see at once that the run is no longer starting
            self._write()

    def end(self, run: TrainingRun, error: BaseException | None) -> None:
        """Record the end. Ranks that end together first wait for rank 0, and time out otherwise."""
        if is_joint(error):
            self._ranks.gather_objects(0)
            state, message = ENDED if error is None else STOPPED, str(error or "")
        else:
            state, message = FAILED, f"{type(error).__name__}: {error}"
        self._has_ended.set()
        self._record = replace(self._record, state=state, message=message[:_LONGEST])
        self._write()

    def _run(self) -> None:
        while not self._has_ended.wait(self._every):
            self._write(is_periodic=True)

    def _write(self, *, is_periodic: bool = False) -> None:
        if self._is_on:
            with self._writing, contextlib.suppress(OSError):
                if is_periodic and self._has_ended.is_set():
                    return  # it waited while the last one was written
                record = replace(self._record, time=time.time())
                files.replace(self._path, json.dumps(asdict(record)) + "\n")
