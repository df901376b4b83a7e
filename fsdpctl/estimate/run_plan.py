"""From a configuration to the memory that the engine will take on its fullest rank."""

from dataclasses import dataclass

from torch import nn

from fsdpctl.config.schema import Config
from fsdpctl.engine.build import Division, divide_module
from fsdpctl.plan.schedule import Prefetch
from fsdpctl.plan.sizes import DTYPE_BYTES, Itemsizes, RankPlace
from fsdpctl.plan.strategy import Strategy, effective_strategy, get_strategy
from fsdpctl.plan.transport import Transport
from fsdpctl.plan.units import UnitSpec, lay_out
from fsdpctl.predict.engine_bytes import (
    ADAMW,
    Estimate,
    KeptStates,
    TrainingPlan,
    estimate,
)
from fsdpctl.resolve.machine import world_size

REPEATING = 3  # micro-steps after which another one needs nothing new


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
    shares = strategy.shares(ranks // parts)
    layouts = lay_out(units, parts, owner_map, shares=shares)
    return ShardedLayout(Division(units, layouts), strategy, parts)


def item_sizes(config: Config) -> Itemsizes:
    """Bytes of one element, for a configuration that is placed."""
    return Itemsizes(*(DTYPE_BYTES[str(name)] for name in config.precision.dtypes))


def kept_states(config: Config) -> KeptStates:
    """What the optimizer keeps."""
    if config.optimizer.name == "sgd":
        return KeptStates(moments=int(config.optimizer.momentum > 0), counter=0)
    return ADAMW


def plan_run(
    config: Config, units: tuple[UnitSpec, ...], num_micro_batches: int
) -> tuple[TrainingPlan, RankPlace]:
    """What a resolved configuration asks of the engine, and where its first rank stands."""
    cut = divide(config, units)
    shown = min(num_micro_batches, REPEATING)
    plan = TrainingPlan(
        cut.division.order,
        cut.division.layouts,
        cut.strategy,
        item_sizes(config),
        Prefetch(config.prefetch.forward, config.prefetch.backward),
        (*[config.accumulation.name == "every"] * (shown - 1), True),
        kept_states(config),
    )
    transport = Transport.NCCL if config.launch.device == "cuda" else Transport.GLOO
    size = cut.ranks_per_copy
    return plan, RankPlace(0, size, world_size(config) // size, transport)


def estimate_run(config: Config, module: nn.Module, num_micro_batches: int) -> Estimate:
    """The most that the fullest rank holds, for a resolved configuration."""
    return estimate(*plan_run(config, divide_module(module, None), num_micro_batches))
