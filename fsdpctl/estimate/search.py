"""Search for the candidates that fit and are predicted to be fastest.

Note: the search skips most combinations. Memory grows with the micro-batch (except for a rank's
whole share at once, which keeps no gradients between micro-batches) and with prefetch, and shrinks
with recomputation. So for each strategy, it finds only the largest size that fits, by bisection.
Time grows with recomputation and shrinks with prefetch, so it predicts only the least recomputation
and the most prefetch that fit. Time mostly shrinks with the micro-batch: it predicts the largest
few sizes that fit. Predictions that differ by less than their accuracy are a tie, which the lower
memory decides.
"""

import heapq
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from itertools import count

from fsdpctl.config.compose import Composed
from fsdpctl.config.schema import Config, Filled
from fsdpctl.config.selection import (
    Selection,
    auto_names,
    reselected_names,
    unset_names,
    with_auto,
    with_defaults,
)
from fsdpctl.errors import UsageError
from fsdpctl.estimate.accuracy import TIE
from fsdpctl.estimate.candidates import (
    Candidate,
    Point,
    Ranking,
    SearchSpace,
    is_distinct_on_cluster,
)
from fsdpctl.estimate.cluster_specs import with_specs
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.estimate.summary import describe_ranking
from fsdpctl.io.activity import doing
from fsdpctl.resolve.machine import supported_strategies
from fsdpctl.resolve.run_plan import RunPlan, make_run_plan

MOST_RANKED = 6  # candidates: the selected one and those that it is compared with
_MAX_GUESSES = 4  # of a recomputation, before bisection
_SIZES_TRIED = 3  # micro-batch sizes per strategy and mode, the largest that fit
# A resumed run selects again if one of these settings has changed.
_SELECTED_FOR = ("launch.device", "launch.nnodes", "launch.nproc_per_node", "cluster.memory")


def estimates_of(
    estimator: Estimator, composed: Composed, *, every: bool
) -> list[tuple[RunEstimate, Ranking | None]]:
    """Estimate a configuration on its cluster, as `decide`.

    With `every`, estimate each strategy that the engine and the other settings support, and that
    differs from others on these nodes, without keys that it does not use; with its defaults if
    nothing fits. UsageError if the configuration is invalid.
    """
    placed = estimator.prepare(composed, every=every).config
    if not every:
        return [resolve_auto(estimator, placed)]
    found, errors = [], []
    for name in (
        each for each in supported_strategies(placed) if is_distinct_on_cluster(placed, each)
    ):
        try:
            estimate, ranking = resolve_auto(estimator, placed.with_strategy(name))
            if ranking is not None and ranking.defaults and not ranking.ranked:
                estimate, ranking = ranking.defaults, None  # comparable with others
            found.append((estimate, ranking))
        except UsageError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return found


def resolve_auto(estimator: Estimator, placed: Filled) -> tuple[RunEstimate, Ranking | None]:
    """Select what is `auto`, and what is not set if its defaults do not fit.

    This is the decision of every command. Returns the estimate with what is selected, and the
    ranking if there is one. If nothing fits, the estimate is that of the closest combination.
    UsageError if no combination is valid.
    """
    names = unset_names(placed)
    if auto_names(placed):
        ranking = rank_candidates(estimator, placed)
        if ranking.ranked or not names:
            return ranking.estimate, ranking
        usual = ranking.estimate
    else:
        ranking, usual = None, estimator.estimate(make_run_plan(placed))
        if usual.fits or not names:
            return usual, None
    more = replace(
        rank_candidates(estimator, with_auto(placed, names), complete=False), defaults=usual
    )
    if not more.ranked and more.estimate.margin <= usual.margin:
        return usual, ranking
    return more.estimate, more


def resolve_auto_of_run(
    estimator: Estimator,
    config: Filled,
    stored: Config | None,
    location: object,
    note: Callable[[str], None],
) -> tuple[RunPlan, RunEstimate, tuple[str, ...]]:
    """Select what is `auto` for the ranks of a run; a resumed run keeps its selection.

    `stored` is the configuration that a resumed run has stored in the file `location`. Returns the
    plan, its estimate, and lines that explain the selection.
    """
    names: tuple[str, ...] = ()
    if stored is not None and all(stored.value(x) == config.value(x) for x in _SELECTED_FOR):
        names = reselected_names(config, stored)
    if stored is not None and names:
        selection = Selection.of(stored)
        plan = make_run_plan(with_auto(config, names), selection)
        line = f"{'auto':<8}{selection.text(names)}, as in {location}"
        return plan, estimator.estimate(plan), (line,)
    if auto_names(config):
        note("selecting the fastest configuration that fits")
    _, ranking = resolve_auto(estimator, config)
    if ranking is None:
        plan = make_run_plan(config)
        return plan, estimator.estimate(plan), ()
    plan = make_run_plan(with_auto(config, ranking.names), ranking.selection)
    return plan, estimator.estimate(plan), (*describe_ranking(ranking),)


def least_memory(estimator: Estimator, placed: Filled, names: Collection[str]) -> RunEstimate:
    """Return an estimate that leaves the reserve, or the closest to it.

    The settings of `names` have their defaults if these leave it, else they are selected.
    """
    found = estimator.estimate_if_fits(make_run_plan(with_defaults(placed, names)))
    if found is not None and found.leaves_reserve:
        return found
    return _CandidateSearch(estimator, with_auto(placed, names)).least_memory()


def rank_candidates(estimator: Estimator, placed: Filled, *, complete: bool = True) -> Ranking:
    """Rank the candidates that fit, for the `auto` settings of a placed configuration.

    The same configuration always gives the same ranking. One that is not `complete` has the same
    first candidate, and of the others those that were met on the way. UsageError if no combination
    is valid, or the hardware specs are incomplete.
    """
    described, whose = with_specs(placed)
    with doing("comparing configurations"):
        search = _CandidateSearch(estimator, described)
        found = tuple(search.ranked(complete=complete))
        closest = None if found else search.closest()
    return Ranking(search.space.names, found, search.space.count, whose, closest)


_PrefetchGroup = tuple[str, int, int | None]  # of points that differ only in prefetch


class _CandidateSearch:
    """A search, with the estimates and predictions made so far."""

    def __init__(self, estimator: Estimator, placed: Filled) -> None:
        self.space = SearchSpace.of(placed, estimator.traced_model(placed).num_blocks)
        self._estimator = estimator
        self._estimates: dict[Point, RunEstimate | None] = {}
        self._seconds: dict[Point, float] = {}
        self._error: UsageError | None = None
        self._leaves_reserve = True

    def ranked(self, *, complete: bool) -> list[Candidate]:
        """Return the selected candidate, then the fastest others.

        All leave the reserve, unless none does.
        """
        found = list(self._fastest())
        if not found and self._leaves_reserve:
            self._leaves_reserve = False
            found = list(self._fastest())
        if not found:
            return []
        selected = self._least_recomputation(self._least_memory_of(found))
        others = [each for each in found if _prefetch_group(each) != _prefetch_group(selected)]
        if complete and len(others) < MOST_RANKED - 1:
            others += self._remaining(
                {selected, *others}, {_prefetch_group(selected), *map(_prefetch_group, others)}
            )
        return [self._candidate(each) for each in (selected, *others[: MOST_RANKED - 1])]

    def least_memory(self) -> RunEstimate:
        """Return an estimate of a point that fits, or of the point that lacks least."""
        any(
            self._fitting_point(each)
            for name in self.space.strategies
            for each in self._extremes(name)
        )
        return self.closest()

    def closest(self) -> RunEstimate:
        """Return the estimate of the point that lacks least.

        UsageError if no point could be estimated.
        """
        found = [each for each in self._estimates.values() if each is not None]
        if not found:
            raise self._error or UsageError("auto: no combination is supported")
        return max(found, key=lambda each: each.margin)

    # ---- time ----------------------------------------------------------------------------

    def _fastest(self) -> Iterator[Point]:
        """Yield points that fit, the fastest first, until the rest cannot matter.

        Between a mode that fits and the lighter one, the fastest point that fits is searched only
        if it may be selected: it takes at least the time of the lighter mode.
        """
        heap = [self._lower_bound(point) for point in self._frontier()]
        heapq.heapify(heap)
        number, best = 0, 0.0
        while heap:
            seconds, point, is_exact = heapq.heappop(heap)
            late = number > 0 and seconds > best * (1 + TIE)
            if number >= MOST_RANKED and late:
                return
            if (fitting := self._fitting_point(point)) is None:
                if (less := self.space.less_prefetch(point)) is not None:
                    heapq.heappush(heap, self._lower_bound(less))
            elif is_exact and fitting == point:
                number, best = number + 1, best or seconds
                yield point
            else:
                least = fitting if late else self._least_recomputation(fitting)
                heapq.heappush(heap, (self._time(least), least, True))

    def _lower_bound(self, point: Point) -> tuple[float, Point, bool]:
        """Return a point after the least time that it may take, and whether it takes that."""
        lighter = self.space.lighter(point)
        if lighter is None or self._estimate(lighter) is None:
            return self._time(point), point, True
        return min(self._time(lighter), self._time(point)), point, False

    def _least_recomputation(self, point: Point) -> Point:
        """Return the least recomputation that fits, if `point` fits and the lighter mode doesn't.

        Memory is nearly linear between two modes: it tries where their line reaches the limit.
        """
        over = self.space.lighter(point)
        if over is None or self._estimate(over) is None:
            return point
        if self._fits(over):
            return over
        for tries in count():
            gap = point.recomputation - over.recomputation
            if gap == 1:
                return point
            more = self._interpolate(over, point) if tries < _MAX_GUESSES else 0
            index = over.recomputation + (min(more, gap - 1) if more > 0 else gap // 2)
            middle = point._replace(recomputation=index)
            if self._fits(middle):
                point = middle
            else:
                over = middle
        raise AssertionError  # the gap shrinks

    def _interpolate(self, over: Point, fits: Point) -> int:
        """Return the steps from `over` until a line to `fits` reaches the limit; 0: unknown."""
        most, least = self._estimate(over), self._estimate(fits)
        if most is None or least is None:
            return 0
        limit = least.available - (least.reserve if self._leaves_reserve else 0)
        saved = most.peak_reserved - least.peak_reserved
        gap = fits.recomputation - over.recomputation
        return -(gap * (limit - most.peak_reserved) // saved) if saved > 0 else 0

    def _frontier(self) -> Iterator[Point]:
        """Yield, per strategy, points with the least recomputation and the most prefetch."""
        for strategy in self.space.strategies:
            below = -1  # index of the largest size that fits with less recomputation
            for mode, edge in self._largest_sizes(strategy):
                for place in range(max(below + 1, edge - _SIZES_TRIED + 1), edge + 1):
                    yield self.space.point(strategy, mode, place, most=True)
                below = max(below, edge)

    def _remaining(self, found: set[Point], kinds: set[_PrefetchGroup]) -> list[Point]:
        """Return other points that fit, the fastest first; last those that differ in prefetch."""
        points = set()
        for strategy in self.space.strategies:
            for mode, edge in self._largest_sizes(strategy):
                for place in range(edge + 1):
                    point: Point | None = self.space.point(strategy, mode, place, most=True)
                    while point is not None:
                        points.add(point)
                        point = self.space.less_prefetch(point)
        fitting = [each for each in points - found if self._fits(each)]
        best: list[Point] = []
        for each in sorted(
            fitting, key=lambda each: (_prefetch_group(each) in kinds, self._time(each), each)
        ):
            if _prefetch_group(each) in kinds or _prefetch_group(each) not in map(
                _prefetch_group, best
            ):
                best.append(each)
        return best

    def _least_memory_of(self, found: list[Point]) -> Point:
        """Return the point with least memory among the fastest, also with less prefetch."""
        limit = self._time(found[0]) * (1 + TIE)
        alike = [point for point in found if self._time(point) <= limit]
        for point in list(alike):
            less = self.space.less_prefetch(point)
            while less is not None and self._time(less) <= limit and self._fits(less):
                alike.append(less)
                less = self.space.less_prefetch(less)
        return min(alike, key=lambda point: self._candidate(point).estimate.peak_reserved)

    def _time(self, point: Point) -> float:
        if point not in self._seconds:
            self._seconds[point] = self._estimator.predict(self.space.plan(point)).seconds
        return self._seconds[point]

    # ---- memory --------------------------------------------------------------------------

    def _largest_sizes(self, strategy: str) -> Iterator[tuple[int, int]]:
        """Yield each recomputation mode, the least first, with the largest size that fits."""
        if not any(map(self._fitting_point, self._extremes(strategy))):
            return
        low, last = -1, len(self.space.sizes) - 1

        def fits(mode: int, place: int) -> bool:
            return (
                self._fitting_point(self.space.point(strategy, mode, place, most=False)) is not None
            )

        for mode in self.space.modes:
            low = largest_true(partial(fits, mode), low, last, last)
            if low >= 0:
                yield mode, low

    def _extremes(self, strategy: str) -> list[Point]:
        """Return the points of which one fits if any does."""
        last, modes = len(self.space.sizes) - 1, self.space.modes
        ends = [(modes[0], last), *((mode, size) for mode in modes[:-3:-1] for size in (0, last))]
        return [self.space.point(strategy, mode, place, most=False) for mode, place in ends]

    def _fitting_point(self, point: Point) -> Point | None:
        """Return a point, or the one in which the last block is treated more lightly, if it fits.

        The activations of that block are alive in its backward anyway: to recompute it may take
        more.
        """
        lighter = self.space.lighter(point)
        before = point._replace(recomputation=point.recomputation - 1)
        tried = (point,) if lighter in (None, before) else (point, before)
        return next(filter(self._fits, tried), None)

    def _fits(self, point: Point) -> bool:
        estimate = self._estimate(point)
        if estimate is None:
            return False
        return estimate.leaves_reserve if self._leaves_reserve else estimate.fits

    def _estimate(self, point: Point) -> RunEstimate | None:
        if point not in self._estimates:
            try:
                self._estimates[point] = self._estimator.estimate(self.space.plan(point))
            except UsageError as error:
                self._error = self._error or error
                self._estimates[point] = None
        return self._estimates[point]

    def _candidate(self, point: Point) -> Candidate:
        estimate = self._estimate(point)
        assert estimate is not None
        return Candidate(self.space.selection(point), estimate, self._time(point))


def _prefetch_group(point: Point) -> _PrefetchGroup:
    return point[:3]


def largest_true(holds: Callable[[int], bool], low: int, high: int, first: int) -> int:
    """Return the largest value up to `high` that holds; `low` does, or is below all values.

    Tries `first`, which is doubled as long as it holds, then the middles.
    """
    over, value = high + 1, first
    while low + 1 < over:
        if holds(value):
            low = value
        else:
            over = value
        value = min(2 * value, high) if over > high else (low + over) // 2
    return low
