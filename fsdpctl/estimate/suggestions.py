"""Changes with which a run fits, cheapest first."""

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

_MOST_SUGGESTED = 3
# In which settings are dispensed with: the last of those first, or smaller micro-batches first.
_DROP_ORDER = (savings.PARAM_OFFLOAD, *savings.SAVINGS_TOGETHER[::-1])
_DROP_ORDERS = (_DROP_ORDER, (savings.MICRO_BATCH_OF_ONE, *_DROP_ORDER))


def suggest(
    estimator: Estimator, plan: RunPlan, *, more_ranks: bool = True
) -> list[FittingSuggestion]:
    """Return up to three changes that make a run fit, cheapest first.

    A model with pretrained weights, or with `more_ranks` any, may also be trained by adapters.
    If no single setting suffices, they are several together, each of which is needed, and with
    `more_ranks` the fewest nodes that suffice. Changes on the same ranks are ordered by the
    predicted step time; if the hardware is not specified, or if error bands of two kinds overlap,
    by what they cost: nothing, a little time, communication, computation.
    """
    with doing("looking for changes that fit"):
        search = _SuggestionSearch(estimator, plan)
        found = search.alone() or search.together(more_ranks=more_ranks)
        if plan.config.model.is_pretrained or more_ranks:
            found += islice(search.fitting(savings.ADAPTERS.suggestions(plan)), 1)
        return [(replace(change, time=search.time(each)), each) for change, each in found]


class _SuggestionSearch:
    def __init__(self, estimator: Estimator, plan: RunPlan) -> None:
        self._estimator, self._plan = estimator, plan

    def fitting(self, changes: Iterable[Suggestion]) -> Iterator[FittingSuggestion]:
        """Yield the changes with which a run fits, and its estimate."""
        for change in changes:
            if (estimate := self._estimator.estimate_if_fits(change.plan)) is not None:
                yield change, estimate

    def time(self, estimate: RunEstimate) -> RunTime | None:
        """Return the predicted time, unless it is for assumed hardware."""
        with suppress(UsageError):
            found = run_time(self._estimator, estimate)
            return found if found.band else None
        return None

    def alone(self) -> list[FittingSuggestion]:
        """Return single settings that suffice; of the values of one setting, the fastest."""
        single = (
            change for knob in savings.SAVINGS_ALONE for change in knob.suggestions(self._plan)
        )
        found: list[FittingSuggestion] = []
        for each in self._by_time(list(self.fitting(chain(self._recomputed(), single)))):
            keys = each[0].values.keys()  # strategies differ in more than their degree
            if "strategy" in keys or all(keys != faster.values.keys() for faster, _ in found):
                found.append(each)
        return found[:_MOST_SUGGESTED]

    def _recomputed(self) -> Iterator[Suggestion]:
        """Yield the recomputation that is predicted to be fastest of those that suffice."""
        with suppress(UsageError):
            asked = with_auto(self._plan.requested, [RECOMPUTATION])
            for each in rank_candidates(self._estimator, asked, complete=False).ranked[:1]:
                values = savings.recomputation_values(self._plan, each.selection.recomputation)
                yield Suggestion(
                    values, "blocks are recomputed", savings.changed_plan(self._plan, values)
                )

    def together(self, *, more_ranks: bool) -> list[FittingSuggestion]:
        """Return settings that suffice together, for each treatment of the optimizer states."""
        here, kept = Suggestion({}, "", self._plan), list[FittingSuggestion]()
        for states in savings.STATE_SAVINGS:
            there = any("states" in x.values.get("strategy.offload", "") for x, _ in kept)
            if states == (savings.GRADIENT_OFFLOAD,) and there:
                continue
            for order in _DROP_ORDERS:
                found = self._needed(here, states, order)
                if found and found[0].settings not in [each.settings for each, _ in kept]:
                    kept.append(found)
        kept = self._by_time(kept)
        nodes = self._on_more_nodes() if more_ranks else None
        return kept[:_MOST_SUGGESTED] if nodes is None else [*kept[: _MOST_SUGGESTED - 1], nodes]

    def _on_more_nodes(self) -> FittingSuggestion | None:
        """Return the fewest nodes on which settings suffice that round nothing, and these."""
        nodes = list(savings.more_nodes(self._plan))
        fewest = [
            (
                bisect_left(
                    nodes,
                    True,
                    key=lambda n: self._fit(_with_savings(n, _all_savings(x))) is not None,
                ),
                x,
            )
            for x in savings.STATE_SAVINGS[:2]
        ]
        index, states = min(fewest, key=lambda each: each[0])
        return None if index == len(nodes) else self._needed(nodes[index], states, _DROP_ORDERS[0])

    def _needed(
        self, base: Suggestion, states: Sequence[MemorySaving], order: Iterable[MemorySaving]
    ) -> FittingSuggestion | None:
        """Return `base` with the settings that it needs to fit; None if all do not suffice.

        The settings are dispensed with in `order`.
        """
        knobs = _all_savings(states)
        found = self._fit(_with_savings(base, knobs))
        for knob in order if found else ():
            fewer = [each for each in knobs if each is not knob]
            if (less := self._fit(_with_savings(base, fewer))) is not None:
                knobs, found = fewer, less
        if found and savings.MICRO_BATCH_OF_ONE in knobs:  # as many as fit
            for size in halves(base.plan):
                some = replace(
                    savings.MICRO_BATCH_OF_ONE, values=partial(micro_batches, sizes=[size])
                )
                larger = [some if each is savings.MICRO_BATCH_OF_ONE else each for each in knobs]
                if (better := self._fit(_with_savings(base, larger))) is not None:
                    return better
        return found

    def _fit(self, change: Suggestion) -> FittingSuggestion | None:
        return next(self.fitting([change]), None)

    def _by_time(self, found: list[FittingSuggestion]) -> list[FittingSuggestion]:
        """Sort by the predicted step time; changes that may err by their difference stay."""
        try:
            plans = [replace(x.plan, config=with_specs(x.plan.config)[0]) for x, _ in found]
            times = [self._estimator.predict(each).seconds for each in plans]
        except UsageError:  # the hardware is not specified
            return found
        in_order: list[tuple[FittingSuggestion, float]] = []
        for one, seconds in zip(found, times, strict=True):
            place = len(in_order)
            while place and is_faster(
                (one[1], seconds), (in_order[place - 1][0][1], in_order[place - 1][1])
            ):
                place -= 1
            in_order.insert(place, (one, seconds))
        return [each for each, _ in in_order]


def _all_savings(states: Sequence[MemorySaving]) -> list[MemorySaving]:
    return [*savings.SAVINGS_TOGETHER, *states, savings.PARAM_OFFLOAD]


def _with_savings(base: Suggestion, knobs: Iterable[MemorySaving]) -> Suggestion:
    """Return `base` with the last change of each knob, in their order."""
    plan, values = base.plan, dict[str, object]()
    costs, effects = list[str](), list[str]()
    for knob in knobs:
        for change in [*knob.suggestions(plan)][-1:]:
            values = {k: v for k, v in values.items() if k not in change.values}
            values |= change.values
            plan = change.plan
            costs.append(change.cost)
            effects.append(change.effect)
    cost, effect = ("; ".join(filter(None, x)) for x in (costs, [*effects, base.effect]))
    return Suggestion({**values, **base.values}, cost, plan, effect)
