"""The training plan of a configuration."""

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

REPEATING = 3  # micro-steps; another one needs no more memory


@dataclass(frozen=True, slots=True)
class ShardedLayout:
    """A model's layout on the ranks under the effective strategy."""

    division: Division
    strategy: Strategy
    ranks_per_copy: int


def divide(config: Config, units: tuple[UnitSpec, ...]) -> ShardedLayout:
    """Lay out the units of a model for a resolved configuration."""
    ranks = world_size(config)
    size = config.strategy.dp_shard_size or ranks
    strategy, parts = effective_strategy(get_strategy(config.strategy.name), size, ranks)
    owner_map = config.strategy.owner_map if strategy.has_owner_map else "even"
    shares = strategy.shares(ranks // parts)
    layouts = lay_out(units, parts, owner_map, shares=shares)
    return ShardedLayout(Division(units, layouts), strategy, parts)


def item_sizes(config: Config) -> Itemsizes:
    """Return the bytes per element, for a placed configuration."""
    return Itemsizes(*(DTYPE_BYTES[str(name)] for name in config.precision.dtypes))


def kept_states(config: Config) -> KeptStates:
    """Return the optimizer states."""
    if config.optimizer.name == "sgd":
        return KeptStates(moments=int(config.optimizer.momentum > 0), counter=0)
    return ADAMW


def plan_run(
    config: Config, units: tuple[UnitSpec, ...], num_micro_batches: int
) -> tuple[TrainingPlan, RankPlace]:
    """Return the plan of a resolved configuration, and the position of its first rank."""
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
    """Return the engine's memory on the fullest rank, for a resolved configuration."""
    return estimate(*plan_run(config, divide_module(module, None), num_micro_batches))
