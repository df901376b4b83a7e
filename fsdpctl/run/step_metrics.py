"""The measurements of one optimizer step, as metrics.jsonl and the terminal show them."""

import math
import resource
from dataclasses import dataclass
from typing import Any

import torch

from fsdpctl.optim.record import StepFigures
from fsdpctl.run.clock import StepTimes
from fsdpctl.run.flops import ModelFlops


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
        """Tokens of all ranks per second."""
        return self.tokens / self.times.total

    @property
    def tokens_per_second_per_rank(self) -> float:
        """Tokens per second of one rank, which on CUDA is one device."""
        return self.tokens_per_second / self.num_ranks

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization; None if the peak of the devices is unknown."""
        return self.flops.utilization(self.tokens_per_second)

    def to_line(self) -> dict[str, Any]:
        """Return the object for metrics.jsonl."""
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
    """Return `value`, or None if it is not finite: JSON has no NaN."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The peak memory of this rank since it started."""

    allocated: int | None  # by tensors; None on the CPU
    reserved: int  # by the caching allocator; on the CPU by the process
    total: int | None = None  # memory of the device
    retries: int | None = None  # how often the allocator had to empty its cache


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def peak_memory(device: torch.device) -> PeakMemory:
    """Return the peak memory of this rank since it started."""
    if device.type == "cuda":
        found = torch.cuda.memory_stats(device)
        return PeakMemory(
            found.get("allocated_bytes.all.peak", 0),
            found.get("reserved_bytes.all.peak", 0),
            torch.cuda.get_device_properties(device).total_memory,
            found.get("num_alloc_retries", 0),
        )
    return PeakMemory(None, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
