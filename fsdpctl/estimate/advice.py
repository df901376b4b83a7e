"""Changes with which a run fits, cheapest first."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

from fsdpctl.errors import UsageError
from fsdpctl.estimate.accuracy import is_faster
from fsdpctl.estimate.changes import (
    Change,
    activations_on_host,
    adapters,
    chunked,
    compressed,
    computed_in_bf16,
    expandable,
    feed_forward_in_chunks,
    fully_sharded,
    in_four_bits,
    micro_batches,
    more_nodes,
    params_on_host,
    recomputed,
    recomputed_in_part,
    reduced_every_time,
    shared_out,
    shared_samples,
    smaller_batch,
    states_on_host,
)
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.hardware import at_speed
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.io.activity import doing
from fsdpctl.plan.sizes import Offload
from fsdpctl.resolve.settle import RunPlan

Fitting = tuple[Change, RunEstimate]
Make = Callable[[RunPlan], Iterator[Change]]

_CHANGES = 3


def advice(estimator: Estimator, plan: RunPlan, *, more_ranks: bool = True) -> list[Fitting]:
    """Return up to three changes that make a run fit, cheapest first.

    A model with pretrained weights, or with `more_ranks` any, may also be trained by adapters.
    If no single setting suffices, they are several together, each of which is needed, and with
    `more_ranks` the fewest nodes that suffice. Changes on the same ranks are ordered by the
    predicted step time; if the hardware is not specified, or if error bands of two kinds overlap,
    by what they cost: nothing, a little time, communication, computation.
    """
    with doing("looking for changes that fit"):
        found = _advice(estimator, plan, more_ranks=more_ranks)
        if plan.config.model.is_pretrained or more_ranks:
            found += islice(_fitting(estimator, adapters(plan)), 1)
    return found


def _advice(estimator: Estimator, plan: RunPlan, *, more_ranks: bool) -> list[Fitting]:
    single = [each for make in _SINGLE for each in make(plan)]
    found: list[Fitting] = []
    for each in _by_time(estimator, list(_fitting(estimator, single))):
        # Of degrees of one setting, the fastest; strategies differ in more.
        is_other = "strategy" in each[0].keys
        if is_other or not any(each[0].keys == faster.keys for faster, _ in found):
            found.append(each)
    if found:
        return found[:_CHANGES]
    found = _by_time(estimator, list(_several(estimator, plan)))
    nodes = _on_more_nodes(estimator, plan) if more_ranks else None
    return found[:_CHANGES] if nodes is None else [*found[: _CHANGES - 1], nodes]


def _fitting(estimator: Estimator, changes: Iterable[Change]) -> Iterator[Fitting]:
    """Yield the changes with which a run fits, and its estimate."""
    for change in changes:
        if (estimate := estimator.fitting(change.plan)) is not None:
            yield change, estimate


def _fit(estimator: Estimator, change: Change) -> Fitting | None:
    return next(_fitting(estimator, [change]), None)


def _by_time(estimator: Estimator, found: list[Fitting]) -> list[Fitting]:
    """Sort changes by the predicted step time; those that may err by their difference stay."""
    if len(found) < 2:
        return found
    try:
        times = [estimator.predict(at_speed(change.plan)[0]).seconds for change, _ in found]
    except UsageError:  # the hardware is not specified
        return found
    timed = [(each, (each[1], seconds)) for each, seconds in zip(found, times, strict=True)]
    in_order: list[tuple[Fitting, tuple[RunEstimate, float]]] = []
    for one in timed:
        place = len(in_order)
        while place and is_faster(one[1], in_order[place - 1][1]):
            place -= 1
        in_order.insert(place, one)
    return [each for each, _ in in_order]


def _several(estimator: Estimator, plan: RunPlan) -> Iterator[Fitting]:
    """Yield settings that suffice together, for each treatment of the optimizer states."""
    seen: set[tuple[str, ...]] = set()
    here, keeps_gradients = Change((), "", plan), False
    for treatment in (None, _STATES, states_on_host, compressed):
        if treatment is states_on_host and keeps_gradients:
            continue
        for order in _ORDERS:
            found = _needed(estimator, here, treatment, order)
            if found is None:
                break
            keeps_gradients |= treatment is _STATES
            if found[0].words not in seen:
                seen.add(found[0].words)
                yield found


def _on_more_nodes(estimator: Estimator, plan: RunPlan) -> Fitting | None:
    """Return the fewest nodes on which settings suffice that round nothing, and these settings."""
    nodes = list(more_nodes(plan))
    fewest = [(len(nodes), None), *((_fewest(estimator, nodes, x), x) for x in (None, _STATES))]
    index, treatment = min(fewest, key=lambda each: each[0])
    if index == len(nodes):
        return None
    return _needed(estimator, nodes[index], treatment, _ORDERS[0])


def _fewest(estimator: Estimator, nodes: list[Change], treatment: Make | None) -> int:
    """Return the index of the fewest `nodes` on which all settings suffice."""

    def suffices(base: Change) -> bool:
        return _fit(estimator, _with(base, _all(treatment))) is not None

    return bisect_left(nodes, True, key=suffices)


def _needed(
    estimator: Estimator, base: Change, treatment: Make | None, order: Iterable[Make]
) -> Fitting | None:
    """Return `base` with the settings that it needs to fit; None if it does not fit with all.

    The settings are dispensed with in `order`.
    """
    makers = _all(treatment)
    found = _fit(estimator, _with(base, makers))
    if found is None:
        return None
    for make in order:
        fewer = [each for each in makers if each is not make]
        change = _with(base, fewer)
        less = found if change.words == found[0].words else _fit(estimator, change)
        if less is not None:
            makers, found = fewer, less
    if _SINGLE_SAMPLE in makers:
        size = base.plan.batches.micro_batch_size // 2
        while size > 1:
            some = partial(micro_batches, size=size)
            larger = [some if each is _SINGLE_SAMPLE else each for each in makers]
            if (better := _fit(estimator, _with(base, larger))) is not None:
                return better
            size //= 2
    return found


def _all(treatment: Make | None) -> list[Make]:
    return [*_TOGETHER, *([] if treatment is None else [treatment]), params_on_host]


def _with(base: Change, makers: Iterable[Make]) -> Change:
    """Return `base` with the last change of each maker, in their order."""
    plan = base.plan
    parts: list[Change] = []
    for make in makers:
        for change in [*make(plan)][-1:]:
            parts = [*_without(parts, change), change]
            plan = change.plan
    parts += [base] if base.words else []
    words = tuple(word for part in parts for word in part.words)
    return Change(words, "; ".join(part.cost for part in parts), plan)


def _without(parts: Iterable[Change], later: Change) -> Iterator[Change]:
    """Yield `parts` without the keys that `later` sets."""
    for part in parts:
        words = tuple(word for word in part.words if word.split("=")[0] not in later.keys)
        if words:
            yield replace(part, words=words)


_STATES: Make = partial(states_on_host, most=Offload.STATES)
_SINGLE_SAMPLE: Make = partial(micro_batches, size=1)
# What costs least first.
_SINGLE: tuple[Make, ...] = (
    expandable,
    chunked,
    reduced_every_time,
    shared_out,
    compressed,
    fully_sharded,
    recomputed_in_part,
    smaller_batch,
    shared_samples,
    recomputed,
    activations_on_host,
    feed_forward_in_chunks,
    states_on_host,
    params_on_host,
    in_four_bits,
    computed_in_bf16,
)
_TOGETHER: tuple[Make, ...] = (
    expandable,
    chunked,
    reduced_every_time,
    shared_out,
    fully_sharded,
    recomputed_in_part,
    recomputed,
    _SINGLE_SAMPLE,
    shared_samples,
    activations_on_host,
    feed_forward_in_chunks,
    in_four_bits,
    computed_in_bf16,
)
# In which settings are dispensed with: the last of those first, or smaller micro-batches first.
_LAST_FIRST = (params_on_host, *_TOGETHER[::-1])
_ORDERS = (_LAST_FIRST, (_SINGLE_SAMPLE, *_LAST_FIRST))
