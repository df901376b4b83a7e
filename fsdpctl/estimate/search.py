"""Search for the configurations that fit and are predicted to be fastest.

Note: the search skips most combinations. Memory grows with prefetch and with the micro-batch, and
shrinks with recomputation. (A rank's whole batch in one micro-batch is an exception, because no
gradients are kept between micro-batches.) So for each strategy, a bisection finds the largest size
that fits. Time grows with recomputation and shrinks with prefetch, so only the least recomputation
and the most prefetch that fit are predicted. Time mostly shrinks with the micro-batch, so only the
largest sizes that fit are predicted. Predictions that differ by less than their accuracy are a tie,
which the lower memory decides.
"""

import heapq
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import count, takewhile

from fsdpctl.config.schema import Filled
from fsdpctl.config.selection import with_auto, with_defaults
from fsdpctl.errors import UsageError
from fsdpctl.estimate.accuracy import TIE
from fsdpctl.estimate.candidates import Candidate, Point, Ranking, SearchSpace
from fsdpctl.estimate.cluster_specs import with_specs
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.io.activity import doing
from fsdpctl.resolve.run_plan import make_run_plan

MOST_RANKED = 6  # candidates in a ranking
_MAX_GUESSES = 4  # interpolations before the bisection of a recomputation
_SIZES_TRIED = 3  # per strategy and mode, the largest that fit


def fitting_or_closest(estimator: Estimator, config: Filled, names: Collection[str]) -> RunEstimate:
    """Return an estimate that leaves the reserve, or the closest to it.

    The settings in `names` are selected if their defaults do not leave the reserve.
    """
    estimate = estimator.estimate_if_fits(make_run_plan(with_defaults(config, names)))
    if estimate is not None and estimate.leaves_reserve:
        return estimate
    return _CandidateSearch(estimator, with_auto(config, names)).fitting_or_closest()


def rank_candidates(estimator: Estimator, config: Filled, *, complete: bool = True) -> Ranking:
    """Rank the candidates that fit, for the `auto` settings of a resolved configuration.

    Equal configurations give equal rankings. A ranking that is not `complete` has the same first
    candidate, and other candidates only as far as the search for the first candidate found them.
    UsageError if no combination is valid, or the hardware specs are incomplete.
    """
    config, spec_source = with_specs(config)
    with doing("comparing configurations"):
        search = _CandidateSearch(estimator, config)
        ranked = tuple(search.ranked(complete=complete))
        closest = None if ranked else search.closest()
    return Ranking(search.space.names, ranked, search.space.count, spec_source, closest)


_PrefetchGroup = tuple[str, int, int | None]  # a point without its prefetch


class _CandidateSearch:
    """A search over the `auto` settings; caches estimates and predictions of points."""

    def __init__(self, estimator: Estimator, config: Filled) -> None:
        self.space = SearchSpace.of(config, estimator.traced_model(config).num_blocks)
        self._estimator = estimator
        self._estimates: dict[Point, RunEstimate | None] = {}
        self._seconds: dict[Point, float] = {}
        self._error: UsageError | None = None
        self._requires_reserve = True

    def ranked(self, *, complete: bool) -> list[Candidate]:
        """Return the selected candidate, then other candidates, the fastest first.

        If no candidate leaves the reserve, those that fit are ranked.
        """
        points = list(self._fastest())
        if not points and self._requires_reserve:
            self._requires_reserve = False
            points = list(self._fastest())
        if not points:
            return []
        selected = self._least_recomputation(self._least_memory_of(points))
        others = [each for each in points if _group(each) != _group(selected)]
        if complete and len(others) < MOST_RANKED - 1:
            others += self._remaining({selected, *others}, {_group(selected), *map(_group, others)})
        return [self._candidate(each) for each in (selected, *others[: MOST_RANKED - 1])]

    def fitting_or_closest(self) -> RunEstimate:
        """Return the estimate of a point that fits, or of the point that lacks least."""
        # Estimate points until a point fits; `closest` reads the cache.
        any(self._fitting(each) for name in self.space.strategies for each in self._extremes(name))
        return self.closest()

    def closest(self) -> RunEstimate:
        """Return the estimate of the point that lacks least; UsageError if there is no estimate."""
        estimates = [each for each in self._estimates.values() if each is not None]
        if not estimates:
            raise self._error or UsageError("auto: no combination is supported")
        return max(estimates, key=lambda each: each.margin)

    # ---- time ----------------------------------------------------------------------------

    def _fastest(self) -> Iterator[Point]:
        """Yield points that fit, the fastest first, until no other point can be ranked.

        The heap is ordered by lower bounds of the time. A point stands for all recomputations
        between its mode and the next lighter mode, whose time is their lower bound. They are
        searched only when the point comes first.
        """
        heap = [self._lower_bound(point) for point in self._frontier()]
        heapq.heapify(heap)
        number, best = 0, 0.0
        while heap:
            seconds, point, is_exact = heapq.heappop(heap)
            is_slower = number > 0 and seconds > best * (1 + TIE)
            if number >= MOST_RANKED and is_slower:
                return
            if (fitting := self._fitting(point)) is None:
                if (less := self.space.less_prefetch(point)) is not None:
                    heapq.heappush(heap, self._lower_bound(less))
            elif is_exact and fitting == point:
                number, best = number + 1, best or seconds
                yield point
            else:
                # A point that is too slow to be selected needs no search between the modes.
                least = fitting if is_slower else self._least_recomputation(fitting)
                heapq.heappush(heap, (self._time(least), least, True))

    def _lower_bound(self, point: Point) -> tuple[float, Point, bool]:
        """Return a lower bound of a point's time, the point, and whether the bound is its time."""
        lighter = self.space.lighter(point)
        if lighter is None or self._estimate(lighter) is None:
            return self._time(point), point, True
        return min(self._time(lighter), self._time(point)), point, False

    def _least_recomputation(self, point: Point) -> Point:
        """Return the least recomputation that fits, down to the lighter mode; `point` fits.

        Memory is nearly linear between two modes: interpolation is usually faster than bisection.
        """
        lighter = self.space.lighter(point)
        if lighter is None or self._estimate(lighter) is None:
            return point
        if self._fits(lighter):
            return lighter
        for tries in count():
            gap = point.recomputation - lighter.recomputation
            if gap == 1:
                return point
            steps = self._interpolate(lighter, point) if tries < _MAX_GUESSES else 0
            index = lighter.recomputation + (min(steps, gap - 1) if steps > 0 else gap // 2)
            middle = point._replace(recomputation=index)
            if self._fits(middle):
                point = middle
            else:
                lighter = middle
        raise AssertionError  # the gap shrinks

    def _interpolate(self, lighter: Point, fitting: Point) -> int:
        """Return the steps from `lighter` until the line to `fitting` is at the limit, or 0."""
        most, least = self._estimate(lighter), self._estimate(fitting)
        if most is None or least is None:
            return 0
        limit = least.available - (least.reserve if self._requires_reserve else 0)
        saved = most.peak_reserved - least.peak_reserved
        gap = fitting.recomputation - lighter.recomputation
        return -(gap * (limit - most.peak_reserved) // saved) if saved > 0 else 0

    def _frontier(self) -> Iterator[Point]:
        """Yield, per strategy, points with the least recomputation and the most prefetch."""
        for strategy in self.space.strategies:
            largest_before = -1  # index of the largest size that fits with less recomputation
            for mode, largest in self._largest_sizes(strategy):
                first = max(largest_before, largest - _SIZES_TRIED) + 1
                for size in range(first, largest + 1):
                    yield self.space.point(strategy, mode, size, most_prefetch=True)
                largest_before = max(largest_before, largest)

    def _remaining(self, ranked: set[Point], groups: set[_PrefetchGroup]) -> list[Point]:
        """Return the points that fit and are not `ranked`, the fastest first.

        Points that differ only in prefetch count once; those like a ranked point come last.
        """
        points = set[Point]()
        for strategy in self.space.strategies:
            for mode, largest in self._largest_sizes(strategy):
                for size in range(largest + 1):
                    point = self.space.point(strategy, mode, size, most_prefetch=True)
                    points |= {point._replace(prefetch=n) for n in range(point.prefetch + 1)}
        fitting = [each for each in points - ranked if self._fits(each)]
        fitting.sort(key=lambda each: (_group(each) in groups, self._time(each), each))
        remaining: list[Point] = []
        for each in fitting:
            group = _group(each)
            if group in groups or group not in map(_group, remaining):
                remaining.append(each)
        return remaining

    def _least_memory_of(self, points: list[Point]) -> Point:
        """Return the point with the least memory among points as fast as the first of `points`.

        Points with less prefetch are considered, too.
        """
        limit = self._time(points[0]) * (1 + TIE)
        tied = [point for point in points if self._time(point) <= limit]
        for point in list(tied):
            less = (point._replace(prefetch=n) for n in reversed(range(point.prefetch)))
            tied += takewhile(lambda each: self._time(each) <= limit and self._fits(each), less)
        return min(tied, key=lambda point: self._candidate(point).estimate.peak_reserved)

    def _time(self, point: Point) -> float:
        if point not in self._seconds:
            self._seconds[point] = self._estimator.predict(self.space.plan(point)).seconds
        return self._seconds[point]

    # ---- memory --------------------------------------------------------------------------

    def _largest_sizes(self, strategy: str) -> Iterator[tuple[int, int]]:
        """Yield each recomputation mode, the least first, with the largest size that fits."""
        if not any(map(self._fitting, self._extremes(strategy))):
            return
        low, last = -1, len(self.space.sizes) - 1

        def fits(mode: int, size: int) -> bool:
            return bool(self._fitting(self.space.point(strategy, mode, size, most_prefetch=False)))

        for mode in self.space.modes:
            low = largest_true(partial(fits, mode), low, last, last)
            if low >= 0:
                yield mode, low

    def _extremes(self, strategy: str) -> list[Point]:
        """Return points of a strategy; if any point of the strategy fits, one of these fits."""
        last, modes = len(self.space.sizes) - 1, self.space.modes
        most_thorough = modes[:-3:-1]
        ends = [(modes[0], last), *((mode, size) for mode in most_thorough for size in (0, last))]
        return [self.space.point(strategy, mode, size, most_prefetch=False) for mode, size in ends]

    def _fitting(self, point: Point) -> Point | None:
        """Return the point, or the point with one block less in its mode, if one of them fits.

        The last block's activations are alive in its backward even if they are recomputed.
        """
        lighter = self.space.lighter(point)
        before = point._replace(recomputation=point.recomputation - 1)
        tried = (point,) if lighter in (None, before) else (point, before)
        return next(filter(self._fits, tried), None)

    def _fits(self, point: Point) -> bool:
        estimate = self._estimate(point)
        if estimate is None:
            return False
        return estimate.leaves_reserve if self._requires_reserve else estimate.fits

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


def _group(point: Point) -> _PrefetchGroup:
    return point[:3]


def largest_true(holds: Callable[[int], bool], low: int, high: int, first: int) -> int:
    """Return the largest value up to `high` for which `holds` is true; it is false above.

    `holds` is true for `low`, or `low` is below all values. The search doubles `first` as long as
    `holds` is true, then bisects.
    """
    too_large, value = high + 1, first
    while low + 1 < too_large:
        if holds(value):
            low = value
        else:
            too_large = value
        value = min(2 * value, high) if too_large > high else (low + too_large) // 2
    return low
