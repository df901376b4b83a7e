"""Changes with which a run fits, cheapest first."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from fsdpctl.config.schema import Config
from fsdpctl.errors import UsageError
from fsdpctl.estimate.changes import (
    Change,
    activations_on_host,
    chunked,
    compressed,
    computed_in_bf16,
    expandable,
    feed_forward_in_chunks,
    fully_sharded,
    in_four_bits,
    more_nodes,
    recomputed,
    recomputed_in_part,
    reduced_every_time,
    shared_out,
    shared_samples,
    single_sample,
    smaller_batch,
    states_on_host,
)
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.hardware import with_speed
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.resolve.context_check import check_shared_rows
from fsdpctl.resolve.preflight import check_offload, check_optimizer

_CHANGES = 3
_ACCURACY = 0.01  # of a predicted time


def advice(
    estimator: Estimator, config: Config, *, more_ranks: bool = True
) -> list[tuple[Change, RunEstimate]]:
    """Return up to three changes that make a resolved configuration fit, cheapest first.

    Single changes are ordered by the predicted step time, or if the hardware is not specified by
    what they cost: nothing, a little time, communication, computation. Then follow several together
    and (with `more_ranks`) more ranks.
    """
    single = [each for make in (*_MAKERS, computed_in_bf16) for each in make(config)]
    found: list[tuple[Change, RunEstimate]] = []
    for each in _by_time(estimator, list(_fitting(estimator, single))):
        if not any(each[0].keys == faster.keys for faster, _ in found):
            found.append(each)
    if len(found) >= _CHANGES:
        return found[:_CHANGES]
    together = _together(config, more_ranks=more_ranks)
    untried = (each for each in together if not any(_has(each, other) for other, _ in found))
    for change, estimate in _fitting(estimator, untried):
        found.append((change, estimate))
        if len(found) == _CHANGES or _adds_ranks(change):
            break
    return found


def _fitting(
    estimator: Estimator, changes: Iterable[Change]
) -> Iterator[tuple[Change, RunEstimate]]:
    """Yield the changes with which a run fits, and its estimate."""
    for change in changes:
        try:
            check_optimizer(change.config)
            check_offload(change.config)
            check_shared_rows(change.config)
            estimate = estimator.estimate(change.config)
        except UsageError:
            continue
        if estimate.verdict == "fits":
            yield change, estimate


def _by_time(
    estimator: Estimator, found: list[tuple[Change, RunEstimate]]
) -> list[tuple[Change, RunEstimate]]:
    """Sort changes by the predicted step time, those that only differ by its accuracy as before."""
    if len(found) < 2:
        return found
    try:
        times = [estimator.predict(with_speed(change.config)[0]).seconds for change, _ in found]
    except UsageError:  # the hardware is not specified
        return found
    ranks = [math.floor(math.log(seconds) / math.log1p(_ACCURACY)) for seconds in times]
    return [each for _, each in sorted(zip(ranks, found, strict=True), key=lambda pair: pair[0])]


def _has(change: Change, cheaper: Change) -> bool:
    """Return whether a change includes one that suffices, or has another value of its keys."""
    return set(cheaper.words) <= set(change.words) or cheaper.keys == change.keys


def _adds_ranks(change: Change) -> bool:
    return any(word.startswith("launch.nnodes=") for word in change.words)


def _together(config: Config, *, more_ranks: bool) -> Iterator[Change]:
    """Yield more and more changes together, then more nodes."""
    parts: list[Change] = []
    together = Change((), "", config)
    for make in (
        expandable,
        chunked,
        reduced_every_time,
        shared_out,
        fully_sharded,
        compressed,
        recomputed_in_part,
        recomputed,
        single_sample,
        shared_samples,
        activations_on_host,
        feed_forward_in_chunks,
        states_on_host,
        in_four_bits,
        computed_in_bf16,
    ):
        for change in make(together.config):
            parts = [*_without(parts, change), change]
            words = tuple(word for part in parts for word in part.words)
            together = Change(words, "; ".join(part.cost for part in parts), change.config)
            if len(words) > 1:
                yield together
    if not more_ranks:
        return
    yield from more_nodes(config)
    if together.words:
        yield from (
            Change(together.words + each.words, f"{together.cost}; {each.cost}", each.config)
            for each in more_nodes(together.config)
        )


def _without(parts: Iterable[Change], later: Change) -> Iterator[Change]:
    """Yield `parts` without the keys that `later` sets."""
    for part in parts:
        words = tuple(word for word in part.words if word.split("=")[0] not in later.keys)
        if words:
            yield replace(part, words=words)


# Of single changes, what costs least first.
_MAKERS: tuple[Callable[[Config], Iterator[Change]], ...] = (
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
    in_four_bits,
)
