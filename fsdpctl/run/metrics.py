"""What is written down of every step: one JSON object a line in metrics.jsonl."""

import contextlib
import json
import math
import os
import resource
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdpctl.errors import NO_ROOM, FsdpctlError, UsageError
from fsdpctl.io.documents import parse_json
from fsdpctl.optim.record import StepFigures
from fsdpctl.run.clock import StepTimes
from fsdpctl.run.flops import ModelFlops

_TAIL_BYTES = 1 << 16  # hold the last lines


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step as it is reported."""

    step: int  # steps done, this one included
    samples: int  # samples consumed, those of this one included
    tokens: int  # of all ranks' samples, without what fills them up
    figures: StepFigures
    lr: float
    times: StepTimes
    memory: "PeakMemory"
    flops: ModelFlops
    num_ranks: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks per second."""
        return self.tokens / self.times.total

    @property
    def tokens_per_second_per_rank(self) -> float:
        """The share of a rank, which on CUDA is a device."""
        return self.tokens_per_second / self.num_ranks

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, where the devices' peak is known."""
        return self.flops.utilization(self.tokens_per_second)

    def to_line(self) -> dict[str, Any]:
        """The object in metrics.jsonl."""
        return {
            "step": self.step,
            "samples": self.samples,
            "loss": finite(self.figures.loss),
            "grad_norm": finite(self.figures.grad_norm),
            "lr": self.lr,
            "tokens": self.tokens,
            "trained_tokens": self.figures.tokens,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "tokens_per_second_per_rank": round(self.tokens_per_second_per_rank, 1),
            "model_flops_per_token": self.flops.per_token,
            "mfu": self.mfu,
            "seconds": round(self.times.total, 6),
            "compute_seconds": round(self.times.compute, 6),
            "exposed_communication_seconds": _rounded(self.times.exposed_communication),
            "data_seconds": round(self.times.data, 6),
            "optimizer_seconds": round(self.times.optimizer, 6),
            "peak_allocated_bytes": self.memory.allocated,
            "peak_reserved_bytes": self.memory.reserved,
            "num_alloc_retries": self.memory.retries,
        }


def finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The most that this rank has held so far."""

    allocated: int | None  # in tensors; not known on the CPU
    reserved: int  # by the caching allocator; on the CPU by the process
    total: int | None = None  # of the device
    retries: int | None = None  # how often its allocator emptied its cache to go on


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def peak_memory(device: torch.device) -> PeakMemory:
    """Of this rank, since it started."""
    if device.type == "cuda":
        found = torch.cuda.memory_stats(device)
        return PeakMemory(
            found.get("allocated_bytes.all.peak", 0),
            found.get("reserved_bytes.all.peak", 0),
            torch.cuda.get_device_properties(device).total_memory,
            found.get("num_alloc_retries", 0),
        )
    return PeakMemory(None, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


class MetricsFile:
    """metrics.jsonl of a run; each line is on its way to the disk when `write` returns."""

    def __init__(
        self,
        path: Path,
        step: int,
        on_line: Callable[[Mapping[str, Any]], None] = lambda line: None,
    ) -> None:
        """Open `path` as it was when the checkpoint of `step` was made: later lines are cut off.

        Those about steps that were not applied, and about restarts, stay. `on_line` is
        called with each line that was written, in the thread that wrote it.

        Raises:
            UsageError: it is damaged, or cannot be written.
            FsdpctlError: the disk is full.
        """
        self._path, self._on_line = path, on_line
        self._writing = threading.Lock()
        try:
            self.seconds_to_save = _cut_back(path, step)
            self._file = path.open("a+", encoding="utf-8")
        except OSError as error:
            # Who has no room made no mistake in what was typed.
            refusal = FsdpctlError if error.errno in NO_ROOM else UsageError
            raise refusal(f"{path}: {error.strerror}") from None

    def cut_back(self, step: int) -> None:
        """Make it as it was after `step`, as far as that goes.

        Raises:
            FsdpctlError: the disk is full, or gone.
        """
        try:
            with self._writing:
                self._file.close()
                _cut_back(self._path, step)
                self._file = self._path.open("a+", encoding="utf-8")
        except OSError as error:
            raise FsdpctlError(f"{self._path}: {error.strerror}") from None

    def write(self, line: dict[str, Any]) -> None:
        """Append one object; any thread may.

        Raises:
            FsdpctlError: the disk is full, or gone.
        """
        try:
            with self._writing:
                self._file.write(json.dumps(line) + "\n")
                self._file.flush()
        except OSError as error:
            raise FsdpctlError(f"{self._path}: {error.strerror}") from None
        self._on_line(line)

    @property
    def is_in_place(self) -> bool:
        """Whether what is written still lies at its path."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False
        except OSError:
            return True  # a file system that does not answer has not lost it

    def put_back(self) -> None:
        """Write everything so far to its path again, and go on there; OSError if that fails."""
        with self._writing:
            self._file.seek(0)
            text = self._file.read()
            self._file.close()
            self._file = self._path.open("a+", encoding="utf-8")
            self._file.truncate(0)
            self._file.write(text)
            self._file.flush()

    def close(self) -> None:
        """Let go of it; nothing is left to be written."""
        with contextlib.suppress(OSError):  # again that of the last `write`
            self._file.close()


@dataclass(frozen=True, slots=True)
class Line:
    """What every line has, and what is looked for in some."""

    step: int
    samples: int | None = None  # of a step: consumed with it
    val_loss: float | None = None
    checkpoint_write_seconds: float = 0.0
    bad_numbers: dict[str, Any] | None = None
    restart: dict[str, Any] | None = None

    @property
    def is_evidence(self) -> bool:
        """Whether nothing else tells of what it says."""
        return self.bad_numbers is not None or self.restart is not None


def last_step(path: Path) -> int:
    """The last step that is done, as the last lines say; 0 where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return 0
    found = 0
    for line in lines:
        with contextlib.suppress(UsageError):  # the first may be cut, the last torn
            found = max(found, parse_json(line, Line, str(path)).step)
    return found


def went_on(path: Path, restart: int) -> bool:
    """Whether the ranks that were started for the `restart`-th time did a step.

    Raises:
        UsageError: metrics.jsonl is damaged.
    """
    restarts = (line.restart for _, line in whole_lines(path)) if path.is_file() else ()
    return any(each is not None and each["number"] == restart for each in restarts)


def whole_lines(path: Path) -> Iterator[tuple[str, Line]]:
    """Every whole line; one that was torn when the run was killed is none.

    Raises:
        UsageError: another one is damaged.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            found = parse_json(line, Line, str(path))
        except UsageError:
            if number == len(lines):
                return
            raise UsageError(f"{path}: line {number} is damaged; move the file away") from None
        yield line, found


def _cut_back(path: Path, step: int) -> float:
    """Returns the most seconds that one of its checkpoints took."""
    if not path.is_file():
        return 0.0
    lines = list(whole_lines(path))
    kept = [line for line, about in lines if about.step <= step or about.is_evidence]
    scratch = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    scratch.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    scratch.replace(path)
    return max((about.checkpoint_write_seconds for _, about in lines), default=0.0)


def was_validated(path: Path, step: int) -> bool:
    """Whether there is a validation loss of `step` in metrics.jsonl.

    Raises:
        UsageError: it is damaged.
    """
    if not path.is_file():
        return False
    return any(about.step == step and about.val_loss is not None for _, about in whole_lines(path))
