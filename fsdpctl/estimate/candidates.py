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

_MOST_PASSES = 8  # micro-batches per step up to which every number that divides the share is tried


class Point(NamedTuple):
    """One value per setting."""

    strategy: str
    recomputation: int  # index among those of the axes
    size: int | None  # of a micro-batch; None: a rank's whole share, if it is not `auto`
    prefetch: int  # index among those of the strategy


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The values of each setting; a setting that is not `auto` has one."""

    config: Filled
    names: tuple[str, ...]  # of the settings that are `auto`
    strategies: tuple[str, ...]
    recomputations: tuple[Recomputation, ...]  # the least first
    sizes: tuple[int | None, ...]  # the smallest first

    @staticmethod
    def of(config: Filled, num_blocks: int) -> "SearchSpace":
        """Return the combinations for a placed configuration of a model with `num_blocks`.

        UsageError if its settings conflict.
        """
        names = auto_names(config)
        return SearchSpace(
            config,
            names,
            _strategies(config) if STRATEGY in names else (config.strategy.name,),
            _recomputations(config, num_blocks)
            if RECOMPUTATION in names
            else (Selection.of(config).recomputation,),
            _micro_batch_sizes(config)
            if MICRO_BATCH in names
            else (config.train.micro_batch_size,),
        )

    @property
    def count(self) -> int:
        prefetches = sum(len(self._prefetches(each)) for each in self.strategies)
        return prefetches * len(self.recomputations) * len(self.sizes)

    @property
    def modes(self) -> list[int]:
        """The indices of the recomputations that treat all blocks alike, and of the most."""
        last = len(self.recomputations) - 1
        alike = (index for index, each in enumerate(self.recomputations) if each.blocks is None)
        return sorted({*alike, last})

    def lighter(self, point: Point) -> Point | None:
        """Return the point with the mode that recomputes less."""
        below = [each for each in self.modes if each < point.recomputation]
        return point._replace(recomputation=below[-1]) if below else None

    def point(self, strategy: str, recomputation: int, place: int, *, most: bool) -> Point:
        """Return a point with the size at index `place`, and the most prefetch or the least."""
        last = len(self._prefetches(strategy)) - 1
        return Point(strategy, recomputation, self.sizes[place], last if most else 0)

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
        """Return the prefetch settings that differ under a strategy, the least first."""
        if PREFETCH not in self.names:
            return (self.config.prefetch,)
        if self.config.engine.name != "fsdpctl":
            return PREFETCHES[-1:]  # other engines ignore it
        row, _ = _effective(self.config, strategy)
        if not row.shards_params:
            return PREFETCHES[:1]
        return PREFETCHES if row.reshard_after_forward else (PREFETCHES[0], PREFETCHES[-1])


def _recomputations(placed: Filled, num_blocks: int) -> tuple[Recomputation, ...]:
    """Return what can be recomputed, the least first."""
    if placed.activation_checkpointing.offload:  # of all recomputed blocks, so some are
        return tuple(map(Recomputation, MODES[1:]))
    # CPU ranks would save nothing; with compiled blocks, sending is not supported for all families.
    sends = placed.launch.device != "cpu" and placed.engine.name == FSDPCTL
    sends &= not placed.train.compile and not placed.is_set("activation_checkpointing.offload")
    return recomputation_steps(num_blocks, LEVELS if sends else MODES)


def is_distinct_on_cluster(config: Config, name: str) -> bool:
    """Return whether a strategy without replicas does not do the same.

    Replicas make sense on several nodes, or if `strategy.dp_shard_size` is set.
    """
    has_replicas = config.launch.nnodes > 1 or config.strategy.dp_shard_size is not None
    return has_replicas or not STRATEGIES[name].replicates


def _strategies(placed: Filled) -> tuple[str, ...]:
    """Return the strategies of the engine, without those that are equivalent on these ranks."""
    found: dict[tuple[Strategy, int], str] = {}
    # Of equivalent ones, the one that runs.
    named = sorted(supported_strategies(placed), key=lambda n: _effective(placed, n)[0].name != n)
    for name in named:
        if is_distinct_on_cluster(placed, name):
            found.setdefault(_effective(placed, name), name)
    return tuple(found.values())


def _effective(placed: Filled, name: str) -> tuple[Strategy, int]:
    under = placed.with_strategy(name)
    size = fill_auto(under, Stage.STRATEGY).strategy.dp_shard_size
    row = STRATEGIES[name]
    return executed_strategy(under, row, ranks_per_replica(row, placed.num_ranks, size))


def _micro_batch_sizes(placed: Filled) -> tuple[int, ...]:
    """Return micro-batch sizes: a rank's whole share, repeated halves, and other divisors."""
    groups, asked = placed.num_groups, placed.accumulation.steps
    samples = placed.train.global_batch_size
    share = -(-samples // groups)
    found = {-(-share // (1 << times)) for times in range(share.bit_length() + 1)}
    found |= {share // passes for passes in range(1, _MOST_PASSES + 1) if share % passes == 0}
    if asked is not None:
        found = {-(-share // asked)}
        plan_batches(
            samples,
            placed.num_ranks,
            micro_batch_size=min(found),
            num_micro_batches=asked,
            context_parallel=placed.train.context_parallel,
        )
    return tuple(sorted(found))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A selection that fits into memory."""

    selection: Selection
    estimate: RunEstimate
    seconds: float  # predicted, per step; those of CPU ranks only rank it


@dataclass(frozen=True, slots=True)
class Ranking:
    """The candidates that fit, the selected one first."""

    names: tuple[str, ...]  # the settings that are selected
    ranked: tuple[Candidate, ...]  # the best that fit; they differ in more than prefetch
    count: int  # of combinations
    spec_source: str  # the source of the hardware specs
    closest: RunEstimate | None = None  # of the combination that lacks least, if none fits
    defaults: RunEstimate | None = None  # of those settings that are not set; they do not fit

    @property
    def estimate(self) -> RunEstimate:
        """The estimate of the selected candidate, or of the combination closest to fitting."""
        found = self.ranked[0].estimate if self.ranked else self.closest
        assert found is not None
        return found

    @property
    def selection(self) -> Selection:
        """The selected values, or those of the combination closest to fitting."""
        return self.ranked[0].selection if self.ranked else Selection.of(self.estimate.config)

    @property
    def summary(self) -> str:
        """The selection, or the closest and the memory that it lacks; with the reason, if any."""
        usual = self.defaults
        same = None if usual is None else Selection.default(usual.config)
        text = " ".join(self.selection.settings(self.names, same))
        if not self.ranked:
            text = f"nothing fits; closest is {text}: {'; '.join(self.estimate.shortages)}"
        elif usual is not None:
            text = f"selected: {text}"
        return text if usual is None else f"the defaults need {usual.excess}; {text}"

    @property
    def predicts(self) -> bool:
        """Whether the seconds of candidates are predictions, and do not only rank them."""
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
