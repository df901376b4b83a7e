"""The combinations that `auto` selects from."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from fsdpctl.config.schema import Config, Filled, PrefetchConfig
from fsdpctl.config.selection import (
    MICRO_BATCH,
    PREFETCH,
    PREFETCHES,
    RECOMPUTATION,
    STRATEGY,
    Selection,
    auto_names,
)
from fsdpctl.estimate.accuracy import ErrorBand, band_of
from fsdpctl.estimate.cluster_specs import ASSUMED
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.plan.batch_plan import plan_batches
from fsdpctl.plan.recomputation import LEVELS, MODES, Recomputation, recomputation_steps
from fsdpctl.plan.strategy import FSDPCTL, STRATEGIES, Strategy, ranks_per_replica
from fsdpctl.resolve.auto_values import Stage, fill_auto
from fsdpctl.resolve.machine import executed_strategy, supported_strategies
from fsdpctl.resolve.run_plan import RunPlan, make_run_plan

# Each number of micro-batches per step up to this number is tried if it divides a rank's batch.
_MOST_MICRO_BATCHES = 8


class Point(NamedTuple):
    """A combination in a search space: one value per setting."""

    strategy: str
    recomputation: int  # an index into `SearchSpace.recomputations`
    size: int | None  # micro-batch; None: a rank's whole batch, if the size is not `auto`
    prefetch: int  # an index into the prefetch settings of the strategy


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The values of each setting to search; a setting that is not `auto` has one value."""

    config: Filled
    names: tuple[str, ...]  # settings that are `auto`
    strategies: tuple[str, ...]
    recomputations: tuple[Recomputation, ...]  # the least first
    sizes: tuple[int | None, ...]  # the smallest first

    @staticmethod
    def of(config: Filled, num_blocks: int) -> "SearchSpace":
        """Return the search space of a model with `num_blocks`; UsageError if settings conflict."""
        names = auto_names(config)
        strategies = _strategies(config) if STRATEGY in names else (config.strategy.name,)
        if RECOMPUTATION in names:
            recomputations = _recomputations(config, num_blocks)
        else:
            recomputations = (Selection.of(config).recomputation,)
        train = config.train
        sizes = _micro_batch_sizes(config) if MICRO_BATCH in names else (train.micro_batch_size,)
        return SearchSpace(config, names, strategies, recomputations, sizes)

    @property
    def count(self) -> int:
        """The number of combinations."""
        prefetches = sum(len(self._prefetches(each)) for each in self.strategies)
        return prefetches * len(self.recomputations) * len(self.sizes)

    @property
    def modes(self) -> list[int]:
        """The indices of recomputations that treat all blocks alike, and of the last one."""
        last = len(self.recomputations) - 1
        uniform = (index for index, each in enumerate(self.recomputations) if each.blocks is None)
        return sorted({*uniform, last})

    def lighter(self, point: Point) -> Point | None:
        """Return the point with the next mode that recomputes less, if there is a lighter mode."""
        lighter = [each for each in self.modes if each < point.recomputation]
        return point._replace(recomputation=lighter[-1]) if lighter else None

    def point(self, strategy: str, mode: int, size_index: int, *, most_prefetch: bool) -> Point:
        """Return a point with the size at `size_index`, and the most prefetch or the least."""
        last = len(self._prefetches(strategy)) - 1
        return Point(strategy, mode, self.sizes[size_index], last if most_prefetch else 0)

    def less_prefetch(self, point: Point) -> Point | None:
        return point._replace(prefetch=point.prefetch - 1) if point.prefetch else None

    def selection(self, point: Point) -> Selection:
        prefetch = self._prefetches(point.strategy)[point.prefetch]
        recomputation = self.recomputations[point.recomputation]
        return Selection(point.strategy, recomputation, prefetch, point.size)

    def plan(self, point: Point) -> RunPlan:
        """Return the plan of a point; UsageError if its settings conflict."""
        return make_run_plan(self.config, self.selection(point))

    def _prefetches(self, strategy: str) -> tuple[PrefetchConfig, ...]:
        """Return the prefetch settings with different effects under a strategy, the least first."""
        if PREFETCH not in self.names:
            return (self.config.prefetch,)
        if self.config.engine.name != FSDPCTL:
            return PREFETCHES[-1:]  # other engines ignore the setting
        row, _ = _effective(self.config, strategy)
        if not row.shards_params:
            return PREFETCHES[:1]
        # Backward gathers nothing if units stay unsharded after forward.
        return PREFETCHES if row.reshard_after_forward else (PREFETCHES[0], PREFETCHES[-1])


def _recomputations(config: Filled, num_blocks: int) -> tuple[Recomputation, ...]:
    """Return the recomputations to try, the least first."""
    if config.activation_checkpointing.offload:  # only inputs of recomputed blocks are offloaded
        return tuple(map(Recomputation, MODES[1:]))
    # Offload saves nothing on CPU ranks, and compiled blocks of some families do not support it.
    offloads = config.launch.device != "cpu" and config.engine.name == FSDPCTL
    offloads &= not config.train.compile and not config.is_set("activation_checkpointing.offload")
    return recomputation_steps(num_blocks, LEVELS if offloads else MODES)


def is_distinct_on_cluster(config: Config, name: str) -> bool:
    """Return whether a strategy differs from all strategies without replicas on the cluster.

    A strategy with replicas differs on several nodes, or if `strategy.dp_shard_size` is set.
    """
    has_replicas = config.launch.nnodes > 1 or config.strategy.dp_shard_size is not None
    return has_replicas or not STRATEGIES[name].replicates


def _strategies(config: Filled) -> tuple[str, ...]:
    """Return the strategies of the engine, one of each kind that is equivalent on these ranks."""
    strategies: dict[tuple[Strategy, int], str] = {}
    # Among equivalent strategies, the effective strategy comes first and is selected.
    names = sorted(supported_strategies(config), key=lambda n: _effective(config, n)[0].name != n)
    for name in names:
        if is_distinct_on_cluster(config, name):
            strategies.setdefault(_effective(config, name), name)
    return tuple(strategies.values())


def _effective(config: Filled, name: str) -> tuple[Strategy, int]:
    """Return the effective strategy of `name` on these ranks, and the ranks per replica."""
    changed = config.with_strategy(name)
    size = fill_auto(changed, Stage.STRATEGY).strategy.dp_shard_size
    row = STRATEGIES[name]
    return executed_strategy(changed, row, ranks_per_replica(row, config.num_ranks, size))


def _micro_batch_sizes(config: Filled) -> tuple[int, ...]:
    """Return micro-batch sizes: a rank's whole batch, repeated halves, and other divisors.

    UsageError if a set number of micro-batches does not divide the batch.
    """
    samples, context = config.train.global_batch_size, config.train.context_parallel
    batch, count = -(-samples // config.data_parallel_size), config.accumulation.steps
    if count is not None:
        ranks, size = config.num_ranks, -(-batch // count)
        plan_batches(
            samples, ranks, micro_batch_size=size, num_micro_batches=count, context_parallel=context
        )
        return (size,)
    sizes = {-(-batch // (1 << times)) for times in range(batch.bit_length() + 1)}
    sizes |= {batch // n for n in range(1, _MOST_MICRO_BATCHES + 1) if batch % n == 0}
    return tuple(sorted(sizes))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A selection that fits into memory."""

    selection: Selection
    estimate: RunEstimate
    seconds: float  # predicted, per step; for CPU ranks only good enough to rank candidates


@dataclass(frozen=True, slots=True)
class Ranking:
    """The candidates that fit, the selected candidate first."""

    names: tuple[str, ...]  # the settings that are selected
    ranked: tuple[Candidate, ...]  # the best; points that differ only in prefetch come last
    count: int  # combinations in the search space
    spec_source: str  # the source of the hardware specs
    closest: RunEstimate | None = None  # if nothing fits, the combination that lacks least memory
    defaults: RunEstimate | None = None  # the defaults, if they do not fit

    @property
    def estimate(self) -> RunEstimate:
        """The estimate of the selected candidate, or of the combination closest to fitting."""
        estimate = self.ranked[0].estimate if self.ranked else self.closest
        assert estimate is not None
        return estimate

    @property
    def selection(self) -> Selection:
        """The selected values, or the values of the combination closest to fitting."""
        return self.ranked[0].selection if self.ranked else Selection.of(self.estimate.config)

    @property
    def summary(self) -> str:
        """The selection, or the closest combination with its shortage, and what defaults need."""
        defaults = self.defaults
        default = None if defaults is None else Selection.default(defaults.config)
        text = " ".join(self.selection.settings(self.names, default))
        if not self.ranked:
            text = f"nothing fits; closest is {text}: {'; '.join(self.estimate.shortages)}"
        elif defaults is not None:
            text = f"selected: {text}"
        return text if defaults is None else f"the defaults need {defaults.excess}; {text}"

    @property
    def predicts(self) -> bool:
        """Whether the seconds of candidates are predictions, not only good enough for ranking."""
        return self.estimate.config.launch.device != "cpu"

    def band_of(self, candidate: Candidate) -> ErrorBand | None:
        """Return the error band of a candidate's time; None if the hardware specs are assumed."""
        if self.spec_source.startswith(ASSUMED):
            return None
        return band_of(candidate.estimate, candidate.seconds)

    def to_dict(self) -> dict[str, Any]:
        return {
            "names": list(self.names),
            "combinations": self.count,
            "prediction_source": self.spec_source,
            "ranked": [
                {
                    "settings": each.selection.text(self.names),
                    "step_seconds": each.seconds if self.predicts else None,
                    "error_band": band and asdict(band),
                    "peak_reserved_bytes": each.estimate.peak_reserved,
                }
                for each in self.ranked
                for band in [self.band_of(each)]
            ],
        }
