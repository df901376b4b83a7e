"""What there is to choose from."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from fsdpctl.config.auto import (
    MICRO_BATCH,
    PREFETCH,
    PREFETCHES,
    RECOMPUTATION,
    RECOMPUTATIONS,
    STRATEGY,
    Selection,
    filled,
    left_open,
)
from fsdpctl.config.schema import Config, PrefetchConfig
from fsdpctl.plan.batch import plan_batches
from fsdpctl.plan.engines import has_strategy
from fsdpctl.plan.strategy import STRATEGIES, Strategy, effective_strategy
from fsdpctl.resolve.machine import resolved_strategy, world_size

_MOST_PASSES = 8  # up to which every number of passes is tried that shares samples out evenly


class Point(NamedTuple):
    """One of each."""

    strategy: str
    recomputation: str
    size: int | None  # of a micro-batch; None: all of a rank's share, as nobody asked for a choice
    prefetch: int  # its place among those of the strategy


@dataclass(frozen=True, slots=True)
class Axes:
    """The values of each, from what takes least memory or time on; what was given stands alone."""

    placed: Config
    names: tuple[str, ...]  # of what is chosen
    strategies: tuple[str, ...]
    recomputations: tuple[str, ...]  # the least first
    sizes: tuple[int | None, ...]  # the smallest first

    @staticmethod
    def of(placed: Config) -> "Axes":
        """What a placed configuration leaves open.

        Raises:
            UsageError: what is given contradicts itself.
        """
        names = left_open(placed)
        given = placed.activation_checkpointing.name
        return Axes(
            placed,
            names,
            _strategies(placed) if STRATEGY in names else (placed.strategy.name,),
            RECOMPUTATIONS if RECOMPUTATION in names else (given,),
            _sizes(placed) if MICRO_BATCH in names else (placed.train.micro_batch_size,),
        )

    @property
    def count(self) -> int:
        """Of combinations."""
        prefetches = sum(len(self._prefetches(each)) for each in self.strategies)
        return prefetches * len(self.recomputations) * len(self.sizes)

    def point(self, strategy: str, recomputation: str, place: int, *, most: bool) -> Point:
        """With the size in a place, and the most prefetch or the least."""
        last = len(self._prefetches(strategy)) - 1
        return Point(strategy, recomputation, self.sizes[place], last if most else 0)

    def less_prefetch(self, point: Point) -> Point | None:
        """The same with less prefetch, if there is less."""
        return point._replace(prefetch=point.prefetch - 1) if point.prefetch else None

    def selection(self, point: Point) -> Selection:
        """Return the values of a point."""
        prefetch = self._prefetches(point.strategy)[point.prefetch]
        return Selection(point.strategy, point.recomputation, prefetch, point.size)

    def config(self, point: Point) -> Config:
        """Return the configuration of a point."""
        config = filled(self.placed, self.selection(point))
        strategy = resolved_strategy(config, config.strategy.under(config.strategy.name))
        return replace(config, strategy=strategy)

    def _prefetches(self, strategy: str) -> tuple[PrefetchConfig, ...]:
        """Those that differ under a strategy, the least first."""
        if PREFETCH not in self.names:
            return (self.placed.prefetch,)
        if self.placed.engine.name != "fsdpctl":
            return PREFETCHES[-1:]  # they do as they do
        row, _ = _effective(self.placed, strategy)
        if not row.shards_params:
            return PREFETCHES[:1]
        return PREFETCHES if row.reshard_after_forward else (PREFETCHES[0], PREFETCHES[-1])


def _strategies(placed: Config) -> tuple[str, ...]:
    """Those that the engine has, and that are not the same as one before on these ranks.

    Copies make sense where there are several nodes, or somebody says how large they are.
    """
    has_copies = placed.launch.nnodes > 1 or placed.strategy.dp_shard_size is not None
    found: dict[tuple[Strategy, int], str] = {}
    for name, row in STRATEGIES.items():
        if has_strategy(placed.engine.name, row) and (has_copies or not row.replicates):
            found.setdefault(_effective(placed, name), name)
    return tuple(found.values())


def _effective(placed: Config, name: str) -> tuple[Strategy, int]:
    ranks = world_size(placed)
    size = resolved_strategy(placed, placed.strategy.under(name)).dp_shard_size
    return effective_strategy(STRATEGIES[name], size or ranks, ranks)


def _sizes(placed: Config) -> tuple[int, ...]:
    """Sizes of micro-batches: all of a rank's share, halves of it on and on, and other divisors."""
    ranks, asked = world_size(placed), placed.accumulation.steps
    samples = max(placed.train.global_batch_size, ranks)
    share = -(-samples // ranks)
    found = {-(-share // (1 << times)) for times in range(share.bit_length() + 1)}
    found |= {share // passes for passes in range(1, _MOST_PASSES + 1) if share % passes == 0}
    if asked is not None:
        found = {-(-share // asked)}
        plan_batches(samples, ranks, micro_batch_size=min(found), num_micro_batches=asked)
    return tuple(sorted(found))
