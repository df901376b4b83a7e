"""What the fullest rank of a run holds, and whether that fits."""

from dataclasses import dataclass
from typing import Any

from fsdpctl.config.schema import Config
from fsdpctl.memory.estimate import MOMENTS
from fsdpctl.memory.script import Writer
from fsdpctl.memory.simulate import Peak, Script, can_play
from fsdpctl.plan.batch import BatchPlan
from fsdpctl.plan.strategy import get_strategy
from fsdpctl.train.footprint import item_sizes
from fsdpctl.train.machine import world_size

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes that are not known exactly."""

    low: int
    high: int


# Assumed, not computed: of a process that uses the device, and of each set of communicators.
_CONTEXT = {
    "cuda": Range(int(0.4 * _GIB), int(0.7 * _GIB)),
    "cpu": Range(int(0.25 * _GIB), int(0.5 * _GIB)),
}
_COMMUNICATOR = Range(int(0.05 * _GIB), int(0.6 * _GIB))
_HOST = {"cuda": 3 * _GIB, "cpu": _GIB // 2}  # of a worker, without what it trains


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """What the fullest rank holds."""

    config: Config  # resolved
    batches: BatchPlan
    num_params: int
    rank: int
    allocated: int  # in tensors, at the peak
    reserved: dict[str, int]  # by the caching allocator, for each way of keeping memory
    peak: Peak
    script: Script
    writer: Writer

    @property
    def memory_bytes(self) -> int:
        """What a rank may use."""
        assert self.config.cluster.memory is not None
        return int(self.config.cluster.memory * _GIB)

    @property
    def peak_reserved(self) -> int:
        """With the allocator that the run uses."""
        return self.reserved[self.config.launch.allocator]

    @property
    def outside(self) -> Range:
        """What is taken outside the allocator: the device's context, and communicators."""
        context = _CONTEXT[str(self.config.launch.device)]
        count = 0
        if self.config.launch.device == "cuda" and world_size(self.config) > 1:
            count = 3 if get_strategy(self.config.strategy.name).replicates else 2
        return Range(
            context.low + count * _COMMUNICATOR.low, context.high + count * _COMMUNICATOR.high
        )

    @property
    def available(self) -> int:
        """What is surely left for the allocator."""
        return self.memory_bytes - self.outside.high

    @property
    def margin(self) -> int:
        """What is left of that; below 0: what is missing."""
        return self.available - self.peak_reserved

    @property
    def verdict(self) -> str:
        """`fits`, `thrashes` (only if the allocator empties its cache on the way), `too_large`.

        What does not simply fit is played again on a device of that size.
        """
        if self.margin >= 0:
            return "fits"
        if self.config.launch.device == "cpu" or self.allocated > self.available:
            return "too_large"
        expandable = self.config.launch.allocator == "expandable"
        streams = self.writer.streams
        if can_play(self.script, self.available, expandable=expandable, streams=streams):
            return "thrashes"
        return "too_large"

    @property
    def checkpoint_bytes(self) -> int:
        """Of a checkpoint on the disk, without its manifest: masters and moments."""
        return self.num_params * self._master_itemsize * (1 + MOMENTS)

    @property
    def host_bytes(self) -> int:
        """Memory of a worker on its machine, about; with the copy that a checkpoint is made of."""
        base = _HOST[str(self.config.launch.device)]
        if self.config.checkpoint.mode != "async":
            return base
        return base + self.checkpoint_bytes // world_size(self.config)

    @property
    def _master_itemsize(self) -> int:
        return item_sizes(self.config).master

    @property
    def breakdown(self) -> dict[str, int]:
        """Bytes at the peak by category; they add up to what is allocated."""
        parts = {category.value: nbytes for category, nbytes in self.peak.breakdown.items()}
        return {**parts, "rounding": self.allocated - sum(parts.values())}

    def to_dict(self) -> dict[str, Any]:
        """What `estimate-memory --json` prints."""
        config, outside = self.config, self.outside
        return {
            "strategy": config.strategy.name,
            "engine": config.engine.name,
            "model": config.model.name,
            "num_parameters": self.num_params,
            "world_size": world_size(config),
            "rank": self.rank,
            "micro_batch_size": self.batches.micro_batch_size,
            "num_micro_batches": self.batches.num_micro_batches,
            "seq_len": config.train.seq_len,
            "tokens_per_step": self.tokens_per_step,
            "peak_allocated_bytes": self.allocated,
            "peak_reserved_bytes": self.peak_reserved,
            "allocator": config.launch.allocator,
            "reserved_bytes": self.reserved,
            "verdict": self.verdict,
            "margin_bytes": self.margin,
            "memory_bytes": self.memory_bytes,
            "outside_bytes": [outside.low, outside.high],
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
            "host_bytes": self.host_bytes,
            "checkpoint_bytes": self.checkpoint_bytes,
            "counts_activations": True,
        }

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        return self.batches.global_batch_size * self.config.train.seq_len
