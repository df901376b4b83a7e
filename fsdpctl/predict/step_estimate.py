"""The peak memory of a rank: a script replayed on the allocators."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fsdpctl.predict.allocator import CachingAllocator
from fsdpctl.predict.memory_recorder import MemoryRecorder, without_gc
from fsdpctl.predict.peak import Constant, Peak, Script, can_run, find_peak, replay
from fsdpctl.predict.recorder import Category, Steps

ALLOCATORS = ("expandable", "native")
_MIB = 1 << 20
# cuBLAS takes a workspace for each of the two threads that call it, of this size on Hopper.
_CUBLAS = (Constant(Category.WORKSPACES, "cuBLAS workspace", 32 * _MIB),) * 2
_ROUNDING = 512  # of CUDA's allocator


@dataclass(frozen=True)
class StepEstimate:
    """The peak memory of a rank, in bytes, and its moment."""

    device: str
    allocator: str  # of the run
    peak: Peak
    script: Script
    recorder: MemoryRecorder

    @cached_property
    def _peaks(self) -> tuple[int, int]:
        """By the run's allocator, which take longer to know than `peak`."""
        return self._replayed(self.allocator)

    def _replayed(self, name: str) -> tuple[int, int]:
        """Return the peaks of an allocator; on the CPU, requests are allocated as they are."""
        if self.device == "cpu":
            return (sum(self.peak.breakdown.values()),) * 2
        allocator = CachingAllocator(expandable=name == "expandable", streams=self.recorder.streams)
        with without_gc():
            replay(self.script, allocator)
        return allocator.peak_allocated, allocator.peak_reserved

    @property
    def allocated(self) -> int:
        """The bytes in tensors."""
        return self._peaks[0]

    @property
    def peak_reserved(self) -> int:
        """The bytes that the run's allocator reserves."""
        return self._peaks[1]

    @property
    def reserved(self) -> dict[str, int]:
        """Bytes by allocator; the one that the run does not use is replayed now."""
        return {
            name: self.peak_reserved if name == self.allocator else self._replayed(name)[1]
            for name in ALLOCATORS
        }

    @property
    def breakdown(self) -> dict[str, int]:
        """Bytes at the peak by category; their sum is `allocated`."""
        parts = {category.value: nbytes for category, nbytes in self.peak.breakdown.items()}
        return {**parts, "rounding": self.allocated - sum(parts.values())}

    def verdict(self, available: int) -> str:
        """Return `fits`, `thrashes` (only by emptying the allocator's cache) or `too_large`.

        A script that does not simply fit is replayed on a device with `available` bytes.
        """
        if sum(self.peak.breakdown.values()) > available:  # which are allocated, at least
            return "too_large"
        if self.peak_reserved <= available:
            return "fits"
        if self.device == "cpu" or self.allocated > available:
            return "too_large"
        grows = self.allocator == "expandable"
        runs = can_run(self.script, available, expandable=grows, streams=self.recorder.streams)
        return "thrashes" if runs else "too_large"

    def to_dict(self) -> dict[str, Any]:
        """Return the part of `estimate-memory --json` that every module has."""
        return {
            "peak_allocated_bytes": self.allocated,
            "peak_reserved_bytes": self.peak_reserved,
            "allocator": self.allocator,
            "reserved_bytes": self.reserved,
            "breakdown": self.breakdown,
            "peak_at": str(self.peak.when),
            "largest": [
                {
                    "category": each.category.value,
                    "what": each.what,
                    "count": each.count,
                    "bytes": each.nbytes,
                }
                for each in self.peak.largest
            ],
            "counts_activations": True,
        }


def estimate_steps(
    recorder: MemoryRecorder, steps: Steps, *, device: str, allocator: str, draws: bool
) -> StepEstimate:
    """Replay `steps`, which record in `recorder`, until they need nothing new.

    On `device` cpu, requests are not rounded. `draws`: the model is initialized on the device.
    """
    on_cuda = device == "cuda"
    with without_gc():
        script = Script(recorder, steps, draws=draws, constants=_CUBLAS if on_cuda else ())
        peak = find_peak(script, recorder.item, _ROUNDING if on_cuda else 1)
    return StepEstimate(device, allocator, peak, script, recorder)
