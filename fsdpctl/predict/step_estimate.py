"""What a rank holds at most: a script played on the allocators."""

from dataclasses import dataclass
from typing import Any

from fsdpctl.predict.allocator import CachingAllocator, PlainAllocator
from fsdpctl.predict.collection import without_collection
from fsdpctl.predict.peak import Constant, Peak, Script, Steps, can_play, find_peak, settle
from fsdpctl.predict.script import Category, Writer

ALLOCATORS = ("expandable", "native")
_MIB = 1 << 20
# cuBLAS takes a workspace for each of the two threads that call it, of this size on Hopper.
_CUBLAS = (Constant(Category.WORKSPACES, "cuBLAS workspace", 32 * _MIB),) * 2
_ROUNDING = 512  # of CUDA's allocator


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """The most that a rank holds, in bytes, and when that is."""

    device: str
    allocator: str  # with which the run keeps memory
    allocated: int  # in tensors
    peak_reserved: int  # by that allocator
    peak: Peak
    script: Script
    writer: Writer

    @property
    def reserved(self) -> dict[str, int]:
        """For each way of keeping memory; those that the run does not use are played now."""
        return {
            name: self.peak_reserved
            if name == self.allocator
            else _played(self.script, self.writer, self.device, name).peak_reserved
            for name in ALLOCATORS
        }

    @property
    def breakdown(self) -> dict[str, int]:
        """Bytes at the peak by category; they add up to what is allocated."""
        parts = {category.value: nbytes for category, nbytes in self.peak.breakdown.items()}
        return {**parts, "rounding": self.allocated - sum(parts.values())}

    def verdict(self, available: int) -> str:
        """`fits`, `thrashes` (only if the allocator empties its cache on the way), `too_large`.

        What does not simply fit is played again on a device with `available` bytes.
        """
        if self.peak_reserved <= available:
            return "fits"
        if self.device == "cpu" or self.allocated > available:
            return "too_large"
        grows = self.allocator == "expandable"
        plays = can_play(self.script, available, expandable=grows, streams=self.writer.streams)
        return "thrashes" if plays else "too_large"

    def to_dict(self) -> dict[str, Any]:
        """The part of `estimate-memory --json` that is the same for every module."""
        return {
            "peak_allocated_bytes": self.allocated,
            "peak_reserved_bytes": self.peak_reserved,
            "allocator": self.allocator,
            "reserved_bytes": self.reserved,
            "breakdown": self.breakdown,
            "when": str(self.peak.when),
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
    writer: Writer, steps: Steps, *, device: str, allocator: str, draws: bool
) -> StepEstimate:
    """Play what `steps` writes until nothing new is asked for.

    Args:
        writer: of `steps`.
        steps: of some engine.
        device: `cpu`, where requests are taken as they are, or `cuda`.
        allocator: one of ALLOCATORS.
        draws: whether the model's values are made on the device.
    """
    on_cuda = device == "cuda"
    with without_collection():
        script = Script(writer, steps, draws=draws, constants=_CUBLAS if on_cuda else ())
        played = _played(script, writer, device, allocator)
        peak = find_peak(script, writer.item, _ROUNDING if on_cuda else 1)
    allocated, reserved = played.peak_allocated, played.peak_reserved
    return StepEstimate(device, allocator, allocated, reserved, peak, script, writer)


def _played(
    script: Script, writer: Writer, device: str, name: str
) -> CachingAllocator | PlainAllocator:
    """An allocator that the script was played on."""
    allocator: CachingAllocator | PlainAllocator = PlainAllocator()
    if device == "cuda":
        allocator = CachingAllocator(expandable=name == "expandable", streams=writer.streams)
    settle(script, allocator)
    return allocator
