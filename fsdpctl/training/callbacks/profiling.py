"""Traces, memory after an out-of-memory error, the heap of CPU ranks, limits of torch.compile.

In traces, units and collectives have names. A snapshot is for https://pytorch.org/memory_viz; the
allocations cost nothing to record. The Python lines that made them are recorded only on request,
since that slows down every allocation.
"""

import ctypes
import logging
import warnings
from pathlib import Path

import torch
from torch.profiler import profile, schedule

from fsdpctl.io.run_files import PROFILE, PROFILES
from fsdpctl.io.texts import one_line
from fsdpctl.run.step_metrics import StepMetrics
from fsdpctl.training.journal import Journal
from fsdpctl.training.requests import RequestFlags
from fsdpctl.training.step import TrainedModel
from fsdpctl.training.trainer import Callback, Trainer

_TRACED = 3  # steps
_SKIPPED = 2  # at a start: the first creates optimizer states, the second starts the tracer
_SKIPPED_LATER = 1
_TRIMMED = 20  # steps between two trims
_MOST_ENTRIES = 100_000  # of the history; keeps the file below a few hundred MB


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
            self._start(run, _SKIPPED)

    def launched(self, run: Trainer) -> None:
        """Count a step of the trace; once it is written, end it on all ranks."""
        if self._profile is None:
            return
        self._profile.step()
        if self._is_written:
            self.end(run, None)
            run.ranks.barrier()  # the files of the other ranks are complete too
            run.requests.done(PROFILE)

    def act(self, run: Trainer, requested: RequestFlags) -> RequestFlags:
        if requested.profile and not run.is_traced and run.step < run.total_steps:
            self._start(run, _SKIPPED_LATER)
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
        first = skipped if steps >= skipped + _TRACED else 0
        with warnings.catch_warnings(action="ignore"):  # of a trace that begins at once
            active = min(_TRACED, steps - first)
            rule = schedule(wait=max(first - 1, 0), warmup=min(first, 1), active=active, repeat=1)
        self._profile = profile(schedule=rule, on_trace_ready=write)
        self._profile.start()
        run.is_traced = True


class HeapTrim(Callback):
    """Returns the free pages of glibc's heap to the system every few steps.

    Note: why the heap grows. Tensors of a step live for different times, so that the next one finds
    the holes that it needs only sometimes: the bytes in use stay, and the heap grows with every
    step. Other allocators keep pages free too, and a fixed threshold for mmap costs a page fault
    for every page of every tensor.
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's only

    def step(self, run: Trainer, done: StepMetrics) -> None:
        if self._trim is not None and done.step % _TRIMMED == 0:
            self._trim(0)


class CompilerReport(Callback, logging.Handler):
    """Warns once if torch.compile gives up on a function, which then runs uncompiled.

    Dynamo only logs that, and the log of a rank is removed when the run succeeds.
    """

    _LOGGER = logging.getLogger("torch._dynamo.convert_frame")

    def __init__(self, journal: Journal) -> None:
        logging.Handler.__init__(self, logging.WARNING)
        self._journal: Journal | None = journal

    def begin(self, run: Trainer) -> None:
        self._LOGGER.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Warn with the reason that Dynamo logs, without its advice."""
        journal, self._journal = self._journal, None
        if journal is not None:
            reason, *_ = record.getMessage().partition("\nTo ")
            line = one_line(" ".join(reason.split()))
            journal.warn(f"train.compile=true: a function runs uncompiled from here: {line}")

    def end(self, run: Trainer, error: BaseException | None) -> None:
        self._LOGGER.removeHandler(self)


def watch_allocations(device: torch.device) -> None:
    """Record the Python lines that allocate tensors from now on."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MOST_ENTRIES)


def keep_snapshot(error: BaseException, run_dir: Path, rank: int) -> None:
    """Write a snapshot, if possible, of an out-of-memory `error`, and name its file there."""
    if not isinstance(error, torch.OutOfMemoryError):
        return
    path = run_dir / f"memory-snapshot-rank-{rank:05d}.bin"
    try:
        path.unlink(missing_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
    except Exception:
        return
    error.args = (f"{error}; memory snapshot: {path} (open it at https://pytorch.org/memory_viz)",)
