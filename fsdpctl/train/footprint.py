"""From a configuration to the memory that the engine will take on its fullest rank."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fsdpctl.config.schema import Config, StrategyConfig
from fsdpctl.data.source import load_data
from fsdpctl.engine.build import Division, divide_module
from fsdpctl.memory.estimate import DTYPE_BYTES, Estimate, TrainingPlan, estimate
from fsdpctl.models.registry import build_model
from fsdpctl.plan.batch import plan_batches
from fsdpctl.plan.replay import Itemsizes, RankPlace
from fsdpctl.plan.schedule import Prefetch
from fsdpctl.plan.strategy import STRATEGIES, Strategy, effective_strategy, get_strategy
from fsdpctl.plan.transport import Transport
from fsdpctl.plan.units import UnitSpec, lay_out
from fsdpctl.train.machine import check_length, placed_on_cluster, resolved_strategy, world_size

_GIB = 1 << 30
_REPEATING = 3  # micro-steps after which another one needs nothing new


@dataclass(frozen=True, slots=True)
class ShardedLayout:
    """How a model lies on the ranks under the strategy that runs."""

    division: Division
    strategy: Strategy
    ranks_per_copy: int


def divide(config: Config, units: tuple[UnitSpec, ...]) -> ShardedLayout:
    """Cut the units of a model as the resolved `config` says."""
    ranks = world_size(config)
    size = config.strategy.dp_shard_size or ranks
    strategy, parts = effective_strategy(get_strategy(config.strategy.name), size, ranks)
    owner_map = config.strategy.owner_map if strategy.has_owner_map else "even"
    return ShardedLayout(Division(units, lay_out(units, parts, owner_map)), strategy, parts)


def plan_run(
    config: Config, units: tuple[UnitSpec, ...], num_micro_batches: int
) -> tuple[TrainingPlan, RankPlace]:
    """What a resolved configuration asks of the engine, and where its first rank stands."""
    cut = divide(config, units)
    precision = config.precision
    sizes = Itemsizes(
        *(
            DTYPE_BYTES[str(name)]
            for name in (precision.param_dtype, precision.reduce_dtype, precision.master_dtype)
        )
    )
    shown = min(num_micro_batches, _REPEATING)
    plan = TrainingPlan(
        cut.division.order,
        cut.division.layouts,
        cut.strategy,
        sizes,
        Prefetch(config.prefetch.forward, config.prefetch.backward),
        (*[config.accumulation.name == "every"] * (shown - 1), True),
    )
    transport = Transport.NCCL if config.launch.device == "cuda" else Transport.GLOO
    size = cut.ranks_per_copy
    return plan, RankPlace(0, size, world_size(config) // size, transport)


def estimate_run(config: Config, module: nn.Module, num_micro_batches: int) -> Estimate:
    """The most that the fullest rank holds, for a resolved configuration."""
    return estimate(*plan_run(config, divide_module(module, None), num_micro_batches))


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """An estimate, and what it is of."""

    config: Config  # resolved
    num_params: int
    estimate: Estimate

    @property
    def memory_bytes(self) -> int:
        """What a rank may use."""
        assert self.config.cluster.memory is not None
        return int(self.config.cluster.memory * _GIB)

    @property
    def verdict(self) -> str | None:
        """`too_large` where what is counted exceeds the memory; else the activations decide."""
        return "too_large" if self.estimate.peak_bytes > self.memory_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """What `estimate-memory --json` prints; null is what this version does not know."""
        config = self.config
        return {
            "strategy": config.strategy.name,
            "model": config.model.name,
            "num_parameters": self.num_params,
            "world_size": world_size(config),
            "rank": self.estimate.rank,
            "peak_allocated_bytes": self.estimate.peak_bytes,
            "peak_reserved_bytes": None,
            "verdict": self.verdict,
            "breakdown": self.estimate.breakdown.to_dict(),
            "when": self.estimate.when,
            "largest": self.estimate.largest.to_dict(),
            "memory_bytes": self.memory_bytes,
            "counts_activations": False,
        }


def estimate_strategies(config: Config, *, every: bool) -> list[RunEstimate]:
    """The estimate for the strategy of `config`, or with `every` for all of them.

    Values that a strategy has no use for are left out under it.

    Raises:
        UsageError: the configuration cannot work.
    """
    check_length(config)
    config = _with_vocabulary(placed_on_cluster(config))
    module = build_model(config.model)
    micro_batches = _num_micro_batches(config)
    return [
        _estimate_strategy(config, module, micro_batches, given)
        for given in (map(config.strategy.under, STRATEGIES) if every else (config.strategy,))
    ]


def _estimate_strategy(
    config: Config, module: nn.Module, num_micro_batches: int, given: StrategyConfig
) -> RunEstimate:
    resolved = replace(config, strategy=resolved_strategy(config, given))
    numel = sum(param.numel() for param in module.parameters())
    return RunEstimate(resolved, numel, estimate_run(resolved, module, num_micro_batches))


def _with_vocabulary(config: Config) -> Config:
    if config.model.vocab_size is not None:
        return config
    vocab_size = load_data(config.data).vocab_size
    return replace(config, model=replace(config.model, vocab_size=vocab_size))


def _num_micro_batches(config: Config) -> int:
    """Of a step; a global batch smaller than the ranks is taken as a sample for each."""
    train, ranks = config.train, world_size(config)
    return plan_batches(
        max(train.global_batch_size, ranks),
        ranks,
        micro_batch_size=train.micro_batch_size,
        num_micro_batches=config.accumulation.steps,
    ).num_micro_batches
