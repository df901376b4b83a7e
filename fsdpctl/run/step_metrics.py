"""The time and the measurements of a step, as metrics.jsonl and the terminal show them."""

import math
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fsdpctl.comm.waits import Mark, Seconds, mark, seconds_between
from fsdpctl.optim.record import StepFigures
from fsdpctl.run.flops import ModelFlops

Phase = Literal["data", "compute", "optimizer"]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The seconds of one step on this rank."""

    total: float
    compute: float  # forward and backward
    exposed_communication: float | None  # in all phases; None: included in the others
    data: float
    optimizer: float  # including the gradient norm


class StepClock:
    """A stopwatch for phases: the host's clock, or on CUDA events, which cost the host nothing."""

    def __init__(self, device: torch.device, take_waits: Callable[[], Seconds] | None) -> None:
        """Start a step. `take_waits()` returns the time spent waiting since its last call."""
        self._on_cuda = device.type == "cuda"
        self._knows_waits = take_waits is not None
        self._take_waits = take_waits or (lambda: lambda: 0.0)
        self._take_waits()
        self._began = mark(on_cuda=self._on_cuda)
        self._last = self._began
        self._laps: list[tuple[Phase, Mark, Mark, Seconds]] = []

    def lap(self, phase: Phase) -> None:
        """Attribute the time since the last lap to `phase`."""
        now = mark(on_cuda=self._on_cuda)
        self._laps.append((phase, self._last, now, self._take_waits()))
        self._last = now

    def times(self) -> StepTimes:
        """Return the times of all laps; may wait for the device."""
        if isinstance(self._last, torch.cuda.Event):
            self._last.synchronize()
        spent = {"data": 0.0, "compute": 0.0, "optimizer": 0.0}
        exposed = 0.0
        for phase, start, end, waits in self._laps:
            waited = waits()
            spent[phase] += max(0.0, seconds_between(start, end) - waited)
            exposed += waited
        total = seconds_between(self._began, self._last)
        known = exposed if self._knows_waits else None
        return StepTimes(total, exposed_communication=known, **spent)


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step as it is reported."""

    step: int  # steps completed, including this one
    samples: int  # samples consumed, including this step
    tokens: int  # in the samples of all ranks, without padding
    figures: StepFigures
    lr: float
    times: StepTimes
    memory: "PeakMemory"
    flops: ModelFlops
    num_ranks: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.times.total

    @property
    def tokens_per_second_per_rank(self) -> float:
        """Tokens per second of one rank, which on CUDA is one device."""
        return self.tokens_per_second / self.num_ranks

    @property
    def has_tokens(self) -> bool:
        """Whether the model is a decoder; otherwise, each sample counts as one token."""
        return self.flops.per_token > 0

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization; None if the peak of the devices is unknown."""
        return self.flops.utilization(self.tokens_per_second)

    def to_line(self) -> dict[str, Any]:
        exposed = self.times.exposed_communication
        speed = round(self.tokens_per_second, 1), round(self.tokens_per_second_per_rank, 1)
        amounts: dict[str, Any] = {
            "tokens": self.tokens,
            "trained_tokens": self.figures.tokens,
            "tokens_per_second": speed[0],
            "tokens_per_second_per_rank": speed[1],
            "model_flops_per_token": self.flops.per_token,
            "mfu": self.mfu,
        }
        if not self.has_tokens:
            names = "loss_count", "samples_per_second", "samples_per_second_per_rank"
            amounts = dict(zip(names, (self.figures.tokens, *speed), strict=True))
        return {
            "step": self.step,
            "samples": self.samples,
            "loss": finite(self.figures.loss),
            "grad_norm": finite(self.figures.grad_norm),
            "lr": self.lr,
            **amounts,
            "seconds": round(self.times.total, 6),
            "compute_seconds": round(self.times.compute, 6),
            "exposed_communication_seconds": None if exposed is None else round(exposed, 6),
            "data_seconds": round(self.times.data, 6),
            "optimizer_seconds": round(self.times.optimizer, 6),
            "peak_allocated_bytes": self.memory.allocated,
            "peak_reserved_bytes": self.memory.reserved,
            "num_alloc_retries": self.memory.retries,
        }


def finite(value: float) -> float | None:
    """Return `value`, or None if it is not finite: JSON has no NaN."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The peak memory of this rank since it started."""

    allocated: int | None  # by tensors; None on the CPU
    reserved: int  # by the caching allocator; on the CPU by the process
    total: int | None = None  # memory of the device
    retries: int | None = None  # how often the allocator had to empty its cache


def peak_memory(device: torch.device) -> PeakMemory:
    if device.type == "cuda":
        found = torch.cuda.memory_stats(device)
        return PeakMemory(
            found.get("allocated_bytes.all.peak", 0),
            found.get("reserved_bytes.all.peak", 0),
            torch.cuda.get_device_properties(device).total_memory,
            found.get("num_alloc_retries", 0),
        )
    unit = 1 if sys.platform == "darwin" else 1024
    return PeakMemory(None, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
