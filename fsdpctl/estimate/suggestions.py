"""Suggestions: changed settings with which a run fits into memory, cheapest first."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice

from fsdpctl.config.selection import RECOMPUTATION, with_auto
from fsdpctl.errors import UsageError
from fsdpctl.estimate import memory_savings as savings
from fsdpctl.estimate.accuracy import is_faster
from fsdpctl.estimate.cluster_specs import with_specs
from fsdpctl.estimate.duration import RunTime, run_time
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.memory_savings import MemorySaving, Suggestion, halves, micro_batches
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.estimate.search import rank_candidates
from fsdpctl.io.activity import doing
from fsdpctl.resolve.run_plan import RunPlan

FittingSuggestion = tuple[Suggestion, RunEstimate]

_MAX_SHOWN = 3
# Savings that turn out to be unnecessary are dropped again, in one of these orders: the most
# expensive first, or the smaller micro-batch first.
_DROP_ORDER = (savings.PARAM_OFFLOAD, *savings.SAVINGS_TOGETHER[::-1])
_DROP_ORDERS = (_DROP_ORDER, (savings.MICRO_BATCH_OF_ONE, *_DROP_ORDER))


def suggest(
    estimator: Estimator, plan: RunPlan, *, more_ranks: bool = True
) -> list[FittingSuggestion]:
    """Return up to three suggestions with which a run fits, cheapest first.

    If no single setting suffices, a suggestion combines several settings, each of which is needed.
    `more_ranks` allows a suggestion with the fewest nodes that suffice. Adapters are suggested
    besides, for pretrained weights or with `more_ranks`.

    Suggestions for the same ranks are ordered by the predicted step time. If the hardware is not
    specified, or if the error bands of two kinds of runs overlap, cheaper suggestions come
    first: no cost, a little time, communication, computation.
    """
    with doing("searching for settings that fit"):
        search = _SuggestionSearch(estimator, plan)
        suggestions = search.alone() or search.together(more_ranks=more_ranks)
        if plan.config.model.is_pretrained or more_ranks:
            suggestions += islice(search.fitting(savings.ADAPTERS.suggestions(plan)), 1)
        return [(replace(x, time=search.time(estimate)), estimate) for x, estimate in suggestions]


class _SuggestionSearch:
    """A search for suggestions with which a plan fits."""

    def __init__(self, estimator: Estimator, plan: RunPlan) -> None:
        self._estimator, self._plan = estimator, plan

    def fitting(self, suggestions: Iterable[Suggestion]) -> Iterator[FittingSuggestion]:
        """Yield the suggestions with which a run fits, each with the estimate of the run."""
        for suggestion in suggestions:
            if (estimate := self._estimator.estimate_if_fits(suggestion.plan)) is not None:
                yield suggestion, estimate

    def time(self, estimate: RunEstimate) -> RunTime | None:
        """Return the predicted time of a run; None if its hardware is assumed or a CPU."""
        with suppress(UsageError):
            time = run_time(self._estimator, estimate)
            return time if time.band else None
        return None

    def alone(self) -> list[FittingSuggestion]:
        """Return single settings that suffice, each with its fastest value."""
        single = (saving.suggestions(self._plan) for saving in savings.SAVINGS_ALONE)
        fastest: list[FittingSuggestion] = []
        for each in self._by_time(list(self.fitting(chain(self._recomputation(), *single)))):
            keys = each[0].values.keys()
            # Strategies are alternatives, not degrees of one saving: list all that fit.
            if "strategy" in keys or all(keys != other.values.keys() for other, _ in fastest):
                fastest.append(each)
        return fastest[:_MAX_SHOWN]

    def _recomputation(self) -> Iterator[Suggestion]:
        """Yield the fastest recomputation that suffices, if there is one."""
        with suppress(UsageError):
            config = with_auto(self._plan.requested, [RECOMPUTATION])
            for each in rank_candidates(self._estimator, config, complete=False).ranked[:1]:
                values = savings.recomputation_values(self._plan, each.selection.recomputation)
                plan = savings.changed_plan(self._plan, values)
                yield Suggestion(values, "blocks are recomputed", plan)

    def together(self, *, more_ranks: bool) -> list[FittingSuggestion]:
        """Return combinations that suffice, one or more for each saving of optimizer states."""
        unchanged, fitting = Suggestion({}, "", self._plan), list[FittingSuggestion]()
        for states in savings.STATE_SAVINGS:
            offloads = any("states" in x.values.get("strategy.offload", "") for x, _ in fitting)
            if states == (savings.GRADIENT_OFFLOAD,) and offloads:
                continue  # offloaded states suffice, so gradients stay on the device
            for order in _DROP_ORDERS:
                needed = self._needed(unchanged, states, order)
                if needed and needed[0].settings not in [each.settings for each, _ in fitting]:
                    fitting.append(needed)
        fitting = self._by_time(fitting)
        extra = self._on_more_nodes() if more_ranks else None
        return fitting[:_MAX_SHOWN] if extra is None else [*fitting[: _MAX_SHOWN - 1], extra]

    def _on_more_nodes(self) -> FittingSuggestion | None:
        """Return the fewest nodes that suffice, with savings; None if no number suffices."""
        nodes = list(savings.more_nodes(self._plan))

        def first_fit(states: Sequence[MemorySaving]) -> int:
            # More nodes never need more memory per rank.
            every = _all_savings(states)
            return bisect_left(nodes, True, key=lambda x: bool(self._fit(_with_savings(x, every))))

        # Without savings of optimizer states, and with offloaded states.
        firsts = [(first_fit(states), states) for states in savings.STATE_SAVINGS[:2]]
        index, states = min(firsts, key=lambda each: each[0])
        return None if index == len(nodes) else self._needed(nodes[index], states, _DROP_ORDERS[0])

    def _needed(
        self, base: Suggestion, states: Sequence[MemorySaving], order: Iterable[MemorySaving]
    ) -> FittingSuggestion | None:
        """Return `base` with the savings that it needs to fit; None if all savings do not suffice.

        Unnecessary savings are dropped in `order`.
        """
        needed = _all_savings(states)
        fitting = self._fit(_with_savings(base, needed))
        for saving in order if fitting else ():
            fewer = [each for each in needed if each is not saving]
            if (fit := self._fit(_with_savings(base, fewer))) is not None:
                needed, fitting = fewer, fit
        single = savings.MICRO_BATCH_OF_ONE
        if fitting and single in needed:
            # One sample fits: try larger micro-batches, the largest first.
            for size in halves(base.plan):
                sized = replace(single, values=partial(micro_batches, sizes=[size]))
                larger = [sized if each is single else each for each in needed]
                if (better := self._fit(_with_savings(base, larger))) is not None:
                    return better
        return fitting

    def _fit(self, suggestion: Suggestion) -> FittingSuggestion | None:
        return next(self.fitting([suggestion]), None)

    def _by_time(self, fitting: list[FittingSuggestion]) -> list[FittingSuggestion]:
        """Sort by the predicted step time.

        The order of two suggestions remains if their error bands do not tell which is faster, or if
        the hardware is not specified.
        """
        try:
            plans = [replace(x.plan, config=with_specs(x.plan.config)[0]) for x, _ in fitting]
            times = [self._estimator.predict(each).seconds for each in plans]
        except UsageError:
            return fitting
        # Not sorted(): `is_faster` is not a total order.
        in_order: list[tuple[Suggestion, tuple[RunEstimate, float]]] = []
        for (suggestion, estimate), seconds in zip(fitting, times, strict=True):
            index = len(in_order)
            while index and is_faster((estimate, seconds), in_order[index - 1][1]):
                index -= 1
            in_order.insert(index, (suggestion, (estimate, seconds)))
        return [(suggestion, estimate) for suggestion, (estimate, _) in in_order]


def _all_savings(states: Sequence[MemorySaving]) -> list[MemorySaving]:
    return [*savings.SAVINGS_TOGETHER, *states, savings.PARAM_OFFLOAD]


def _with_savings(base: Suggestion, combined: Iterable[MemorySaving]) -> Suggestion:
    """Return `base` with the last suggestion of each saving, applied one after another."""
    plan, values = base.plan, dict[str, object]()
    costs, effects = list[str](), list[str]()
    for saving in combined:
        for suggestion in [*saving.suggestions(plan)][-1:]:
            # A repeated key moves to the end.
            values = {k: v for k, v in values.items() if k not in suggestion.values}
            values |= suggestion.values
            plan = suggestion.plan
            costs.append(suggestion.extra_work)
            effects.append(suggestion.effect)
    cost, effect = ("; ".join(filter(None, x)) for x in (costs, [*effects, base.effect]))
    return Suggestion({**values, **base.values}, cost, plan, effect)
