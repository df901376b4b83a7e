"""The training plan of a configuration."""

from dataclasses import dataclass

from torch import nn

from fsdpctl.config.schema import Config
from fsdpctl.engine.build import Division, divide_module
from fsdpctl.plan.owners import OwnerMap
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
    num_replicas: int

    def plan(
        self,
        sizes: Itemsizes,
        prefetch: Prefetch,
        reduces: tuple[bool, ...],
        states: KeptStates = ADAMW,
    ) -> TrainingPlan:
        """Return the training plan; `reduces` as in `TrainingPlan`."""
        order, layouts = self.division.order, self.division.layouts
        return TrainingPlan(order, layouts, self.strategy, sizes, prefetch, reduces, states)

    def place(self, device: str) -> RankPlace:
        """Return the position of the first rank."""
        transport = Transport.NCCL if device == "cuda" else Transport.GLOO
        return RankPlace(0, self.ranks_per_copy, self.num_replicas, transport)


def lay_out_model(
    units: tuple[UnitSpec, ...],
    strategy: Strategy,
    ranks: int,
    copy_size: int,
    owner_map: str | OwnerMap,
) -> ShardedLayout:
    """Lay out a model under a strategy with `copy_size` ranks per replica."""
    effective, parts = effective_strategy(strategy, copy_size, ranks)
    owner_map = owner_map if effective.has_owner_map else "even"
    layouts = lay_out(units, parts, owner_map, shares=effective.shares(ranks // parts))
    return ShardedLayout(Division(units, layouts), effective, parts, ranks // parts)


def divide(config: Config, units: tuple[UnitSpec, ...]) -> ShardedLayout:
    """Lay out the units of a model for a resolved configuration."""
    given, ranks = config.strategy, world_size(config)
    size = given.dp_shard_size or ranks
    return lay_out_model(units, get_strategy(given.name), ranks, size, given.owner_map)


def reducing_passes(count: int, *, every: bool) -> tuple[bool, ...]:
    """Return whether each pass of a step reduces gradients: every one, or only the last."""
    return (*[every] * (count - 1), True)


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
    layout = divide(config, units)
    shown, every = min(num_micro_batches, REPEATING), config.accumulation.name == "every"
    plan = layout.plan(
        item_sizes(config),
        Prefetch(config.prefetch.forward, config.prefetch.backward),
        reducing_passes(shown, every=every),
        kept_states(config),
    )
    return plan, layout.place(str(config.launch.device))


def estimate_run(config: Config, module: nn.Module, num_micro_batches: int) -> Estimate:
    """Return the engine's memory on the fullest rank, for a resolved configuration."""
    return estimate(*plan_run(config, divide_module(module, None), num_micro_batches))
