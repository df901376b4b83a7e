"""What a rank of a configured run holds at most, when and why, and whether that fits."""

from dataclasses import dataclass, replace
from typing import Any

from fsdpctl.config.schema import Config
from fsdpctl.data.source import load_data
from fsdpctl.errors import UsageError
from fsdpctl.memory.allocator import CachingAllocator, PlainAllocator
from fsdpctl.memory.ddp_steps import DataParallel, DataParallelSteps
from fsdpctl.memory.estimate import MOMENTS, estimate
from fsdpctl.memory.fsdp2_steps import FullyShard, FullyShardSteps
from fsdpctl.memory.own_steps import OwnSteps
from fsdpctl.memory.script import Category, Writer
from fsdpctl.memory.simulate import Constant, Peak, Script, Steps, can_play, find_peak, settle
from fsdpctl.plan.batch import BatchPlan, plan_batches
from fsdpctl.plan.strategy import STRATEGIES, get_strategy
from fsdpctl.train.footprint import REPEATING, item_sizes, plan_run
from fsdpctl.train.loss import loss_chunk_tokens
from fsdpctl.train.machine import (
    check_length,
    placed_on_cluster,
    resolved_strategy,
    world_size,
)
from fsdpctl.train.traced import TracedModel

_GIB, _MIB = 1 << 30, 1 << 20
ALLOCATORS = ("native", "expandable")
# cuBLAS takes a workspace for each of the two threads that call it, of this size on Hopper.
_CUBLAS = (Constant(Category.WORKSPACES, "cuBLAS workspace", 32 * _MIB),) * 2
_ROUNDING = 512


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


class Weigher:
    """Estimates configurations; what was observed of a model serves all that compute alike."""

    def __init__(self) -> None:
        self._traced: dict[tuple[object, ...], TracedModel] = {}

    def weigh(self, config: Config) -> RunEstimate:
        """The estimate for a resolved configuration.

        Raises:
            UsageError: it cannot work.
        """
        traced = self._traced_model(config)
        batches = batches_of(config)
        micro = batches.micro_batch_size
        chunk = loss_chunk_tokens(config, micro)
        program = traced.program(micro, config.train.seq_len, chunk)
        last = traced.units[-1]
        writer = Writer(program, last.name, last_is_head=last.kind == "head")
        on_cuda = config.launch.device == "cuda"
        steps, rank = _steps(config, traced, batches, writer)
        draws = config.engine.name == "fsdpctl" and not config.model.is_pretrained
        script = Script(writer, steps, draws=draws, constants=_CUBLAS if on_cuda else ())
        reserved, allocated = {}, 0
        for name in ALLOCATORS:
            allocator: CachingAllocator | PlainAllocator = PlainAllocator()
            if on_cuda:
                expandable = name == "expandable"
                allocator = CachingAllocator(expandable=expandable, streams=writer.streams)
            settle(script, allocator)
            reserved[name] = allocator.peak_reserved
            if name == config.launch.allocator:
                allocated = allocator.peak_allocated
        peak = find_peak(script, writer.item, _ROUNDING if on_cuda else 1)
        return RunEstimate(
            config, batches, traced.num_params, rank, allocated, reserved, peak, script, writer
        )

    def _traced_model(self, config: Config) -> TracedModel:
        alike = (
            config.model,
            config.precision.param_dtype,
            config.activation_checkpointing.name,
            config.launch.device,
        )
        if alike not in self._traced:
            self._traced[alike] = TracedModel(config)
        return self._traced[alike]


def batches_of(config: Config) -> BatchPlan:
    """Of a step; a global batch smaller than the ranks is taken as a sample for each."""
    train, ranks = config.train, world_size(config)
    return plan_batches(
        max(train.global_batch_size, ranks),
        ranks,
        micro_batch_size=train.micro_batch_size,
        num_micro_batches=config.accumulation.steps,
    )


def _steps(
    config: Config, traced: TracedModel, batches: BatchPlan, writer: Writer
) -> tuple[Steps, int]:
    """Who writes the operations, and of which rank."""
    shown = min(batches.num_micro_batches, REPEATING)
    sizes, strategy = item_sizes(config), get_strategy(config.strategy.name)
    if not has_strategy(config.engine.name, strategy.name):
        can = ", ".join(name for name in STRATEGIES if has_strategy(config.engine.name, name))
        raise UsageError(
            f"engine={config.engine.name}: not with strategy={strategy.name}; it can {can}"
        )
    if config.engine.name == "ddp":
        return DataParallelSteps(DataParallel(traced.units, sizes, shown), writer), 0
    if config.engine.name == "fsdp2":
        parts = config.strategy.dp_shard_size or world_size(config)
        reduces = (*[config.accumulation.name == "every"] * (shown - 1), True)
        ahead = max(1, config.prefetch.backward)
        model = FullyShard(
            traced.units, parts, sizes, strategy.reshard_after_forward, ahead, reduces
        )
        return FullyShardSteps(model, writer), 0
    plan, place = plan_run(config, traced.units, batches.num_micro_batches)
    if not all(layout.is_even for of_unit in plan.layouts.values() for layout in of_unit):
        place = replace(place, rank=estimate(plan, place).rank)
    return OwnSteps(plan, place, writer), place.rank


def weigh_strategies(weigher: Weigher, config: Config, *, every: bool) -> list[RunEstimate]:
    """The estimate for the strategy of `config`, or with `every` for all that its engine has.

    Values that a strategy has no use for are left out under it.

    Raises:
        UsageError: the configuration cannot work.
    """
    placed = placed_for_estimate(config)
    given = map(config.strategy.under, STRATEGIES) if every else [config.strategy]
    return [
        weigher.weigh(replace(placed, strategy=resolved_strategy(placed, each)))
        for each in given
        if not every or has_strategy(config.engine.name, each.name)
    ]


def has_strategy(engine: str, name: str) -> bool:
    """Whether an engine can do what a strategy says."""
    strategy = get_strategy(name)
    can = {"ddp": name == "no_shard", "fsdp2": strategy.shards_params}
    return can.get(engine, True)


def placed_for_estimate(config: Config) -> Config:
    """`config` on its cluster, with the vocabulary of its data where it names none.

    Raises:
        UsageError: the configuration cannot work.
    """
    check_length(config)
    placed = placed_on_cluster(config)
    if config.model.vocab_size is not None:
        return placed
    vocab_size = load_data(config.data).vocab_size
    return replace(placed, model=replace(placed.model, vocab_size=vocab_size))
