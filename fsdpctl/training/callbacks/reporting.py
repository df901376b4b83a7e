"""The reports of a run: metrics, its heartbeat, the cost of a restart, and its first steps."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from fsdpctl.comm.mesh import ObjectExchange
from fsdpctl.data.mixture import MixedRows
from fsdpctl.io import files
from fsdpctl.io.run_files import HEARTBEAT
from fsdpctl.io.texts import format_bytes
from fsdpctl.run.environment import Restart, SavedEstimate, read_estimate
from fsdpctl.run.heartbeat import ENDED, FAILED, INTERVAL, STOPPED, HeartbeatRecord, pid_namespace
from fsdpctl.run.step_metrics import StepMetrics, finite, peak_memory
from fsdpctl.training.callbacks.checkpoints import Checkpoints
from fsdpctl.training.journal import Journal
from fsdpctl.training.requests import RequestFlags
from fsdpctl.training.trainer import Callback, Trainer, is_joint

_STEPS = 3  # the first of which compiles and allocates; then the allocator has its size
RESTART = "FSDPCTL_RESTART"  # in the environment
_LONGEST = 2000  # characters of a message


class EstimateReport(Callback):
    """The peak memory of a run, on GPUs next to the estimate after the first steps, as the time."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        """Compare with the estimate in `run_dir` after three steps from `first_step` on."""
        self._estimate = read_estimate(run_dir)
        self._at = first_step + _STEPS
        self._seconds: list[float] = []

    def step(self, run: Trainer, done: StepMetrics) -> None:
        if len(self._seconds) < _STEPS:
            self._seconds.append(done.times.total)
            if len(self._seconds) == _STEPS and (found := self.time()) is not None:
                run.journal.remark(found[0])
                run.journal.record(found[1])

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
        return message, {"step_seconds": measured, "predicted_step_seconds": predicted}

    def act(self, run: Trainer, requested: RequestFlags) -> RequestFlags:
        if run.step == self._at and run.parts.device.type == "cuda":
            memory = peak_memory(run.parts.device)
            own = (memory.allocated or 0, memory.reserved)
            allocated, reserved = map(max, zip(*run.ranks.gather_objects(own), strict=True))
            peaks = {"peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved}
            run.journal.record(peaks)
            if self._estimate is not None:
                run.journal.remark(_compared_peaks(peaks, self._estimate))
        return requested

    def end(self, run: Trainer, error: BaseException | None) -> None:
        """After the last step, record and print the peak memory of CPU processes."""
        if error is None and run.parts.device.type == "cpu":
            reserved = max(run.ranks.gather_objects(peak_memory(run.parts.device).reserved))
            run.journal.record({"peak_resident_bytes": reserved})
            run.journal.remark(self.memory(reserved))

    def memory(self, resident: int) -> str:
        """Return a message about the memory of a CPU process, next to the estimate."""
        text = f"memory: {format_bytes(resident)} per process, with Python and its libraries"
        if self._estimate is None:
            return text
        return f"{text}; {format_bytes(self._estimate.peak_reserved_bytes)} estimated for tensors"


def _compared_peaks(peaks: Mapping[str, int], known: SavedEstimate) -> str:
    texts = []
    for name in ("allocated", "reserved"):
        measured, estimated = peaks[f"peak_{name}_bytes"], getattr(known, f"peak_{name}_bytes")
        off = "equal to the estimate"
        if measured != estimated:
            off = f"{format_bytes(estimated)} estimated ({_deviation(estimated, measured, 1)})"
        texts.append(f"{format_bytes(measured)} {name} peak, {off}")
    return f"memory: {'; '.join(texts)}"


def _deviation(expected: float, measured: float, digits: int = 0) -> str:
    off = expected / measured - 1 if measured else 0.0
    return f"{abs(off):.{digits}%} {'above' if off >= 0 else 'below'} measured"


class RunReporter(Callback):
    """The metrics of each step, the progress bar, and the cost of a restart."""

    def __init__(self, journal: Journal, checkpoints: Checkpoints | None) -> None:
        self._journal, self._checkpoints = journal, checkpoints
        text = os.environ.get(RESTART)  # of the restart that started this worker
        self._restart = msgspec.json.decode(text, type=Restart) if text else None

    def begin(self, run: Trainer) -> None:
        self._journal.progress.start(compiles=run.parts.config.train.compile)

    def step(self, run: Trainer, done: StepMetrics) -> None:
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
            seconds = round(time.time() - restart.failed_at, 3)
            restart = replace(restart, step=done.step, seconds_to_next_step=seconds)
            self._journal.record({"restart": asdict(restart)})
            text = f"first completed step, {seconds:.1f} s after the failure"
            self._journal.say(f"step {done.step}: {text}")
        share = None if self._checkpoints is None else self._checkpoints.share_written
        self._journal.progress.step(done, share)

    def end(self, run: Trainer, error: BaseException | None) -> None:
        self._journal.progress.stop(is_complete=error is None)
        self._journal.end(well=is_joint(error))


class Heartbeat(Callback):
    """A thread of rank 0 that writes heartbeat.json until the process ends, whatever training does.

    A failure to write is ignored: readers then see the age of the last heartbeat.
    """

    def __init__(
        self, run_dir: Path, ranks: ObjectExchange, *, is_on: bool = True, every: float = INTERVAL
    ) -> None:
        """Write the first heartbeat and start the thread, if this rank `is_on`."""
        self._path, self._ranks, self._is_on, self._every = run_dir / HEARTBEAT, ranks, is_on, every
        self._facts: dict[str, Any] = {"namespace": pid_namespace()}
        self._first: tuple[int, float] | None = None  # the first step, and when it was completed
        self._has_ended = threading.Event()
        self._writing = threading.Lock()
        if is_on:
            self._write()
            threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def step(self, run: Trainer, done: StepMetrics) -> None:
        step, now = done.step, time.monotonic()
        is_first = self._first is None
        if self._first is None:
            self._first = step, now
        first, began = self._first
        each = (now - began) / (step - first) if step > first else None
        self._facts = {**self._facts, "step": step, "seconds_per_step": each}
        if is_first:  # readers shall see at once that the run is no longer starting
            self._write()

    def end(self, run: Trainer, error: BaseException | None) -> None:
        """Record the end. Ranks that end together first wait for rank 0, and time out otherwise."""
        if is_joint(error):
            self._ranks.gather_objects(0)
            state, message = ENDED if error is None else STOPPED, str(error or "")
        else:
            state, message = FAILED, f"{type(error).__name__}: {error}"
        self._has_ended.set()
        self._facts = {**self._facts, "state": state, "message": message[:_LONGEST]}
        self._write()

    def _run(self) -> None:
        while not self._has_ended.wait(self._every):
            self._write(is_periodic=True)

    def _write(self, *, is_periodic: bool = False) -> None:
        if self._is_on:
            with self._writing, contextlib.suppress(OSError):
                if is_periodic and self._has_ended.is_set():
                    return  # it waited while the last one was written
                host, now = socket.gethostname(), time.time()
                record = HeartbeatRecord(host, os.getpid(), now, **self._facts)
                files.replace(self._path, json.dumps(asdict(record)) + "\n")
