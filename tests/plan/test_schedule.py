"""Properties of every schedule, and known schedules."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpctl.plan.layout import ParamSpec
from fsdpctl.plan.precision import Precision
from fsdpctl.plan.schedule import Event, EventKind, Schedule, step_events
from fsdpctl.plan.step_plan import (
    MeshPosition,
    Prefetch,
    Reductions,
    StepPlan,
    Transport,
    assign_unshard_buffers,
)
from fsdpctl.plan.strategy import STRATEGIES
from fsdpctl.plan.units import UnitOrder, UnitSpec, lay_out
from tests.engine.events import unsharded_units

K = EventKind
COMPUTES = (K.FORWARD, K.LEAVE, K.BACKWARD)


def moves_of(events: Sequence[Event]) -> list[tuple[EventKind, str]]:
    """Return the kinds and units of all events but those of computation."""
    return [(event.kind, event.unit) for event in events if event.kind not in COMPUTES]


def as_text(events: Sequence[Event]) -> str:
    return ", ".join(f"{kind} {unit}" for kind, unit in moves_of(events))


orders = st.integers(1, 6).map(lambda n: UnitOrder(
    "root", ("embed", *(f"b{i}" for i in range(n)), "head"), frozenset({"embed"})
))  # fmt: skip
prefetches = st.builds(Prefetch, st.integers(0, 2), st.integers(0, 2))


@given(orders, prefetches, st.sampled_from(["full_shard", "shard_grad_op"]))
def test_every_unit_is_gathered_before_use_released_after_and_reduced_once(order, prefetch, name):
    events = step_events(Schedule(order, STRATEGIES[name], prefetch, of_one_byte(order)))
    for unit in (order.root, *order.forward):
        kinds = [kind for kind, name in moves_of(events) if name == unit]
        assert [kind for kind in kinds if kind in (K.REDUCE, K.REDUCED)] == [K.REDUCE, K.REDUCED]
        moves = [kind for kind in kinds if kind not in (K.REDUCE, K.REDUCED)]
        passes = len(moves) // 3
        assert moves == [K.GATHER, K.READY, K.FREE] * passes
        stays = unit in (order.root, order.forward[-1]) or name == "shard_grad_op"
        assert passes == (1 if stays or unit in order.lookups else 2)


def of_one_byte(order: UnitOrder, budget: int = 1) -> Reductions:
    """Return reductions of units of one byte each."""
    return Reductions(dict.fromkeys((order.root, *order.forward), 1), budget)


@given(orders, prefetches)
def test_full_shard_has_at_most_depth_plus_one_blocks_unsharded(order, prefetch):
    events = step_events(Schedule(order, STRATEGIES["full_shard"], prefetch, of_one_byte(order)))
    for alive in unsharded_units(events):
        assert len([unit for unit in alive if unit.startswith("b")]) <= prefetch.depth + 1


@given(orders, prefetches)
def test_units_that_are_unsharded_together_have_different_slots(order, prefetch):
    nbytes = dict.fromkeys(("root", *order.forward), 10)
    buffers = assign_unshard_buffers(nbytes, "root", order.forward, prefetch.depth)
    assert sorted(unit for buffer in buffers for unit in buffer.units) == sorted(nbytes)
    events = step_events(Schedule(order, STRATEGIES["full_shard"], prefetch, of_one_byte(order)))
    for alive in unsharded_units(events):
        for buffer in buffers:
            assert len(alive & set(buffer.units)) <= 1


def test_units_compute_while_they_are_unsharded():
    order = UnitOrder("root", ("a", "b"))
    for name in ("full_shard", "no_shard"):
        events = step_events(Schedule(order, STRATEGIES[name], Prefetch(0, 0), of_one_byte(order)))
        computed = [f"{event.kind} {event.unit}" for event in events if event.kind in COMPUTES]
        assert computed == [
            "forward root", "forward a", "leave a", "forward b", "leave b", "backward b",
            "backward a", "leave root",
        ]  # fmt: skip
        alive = unsharded_units(events)
        for event, whole in zip(events, alive, strict=True):
            if name == "full_shard" and event.kind in (K.FORWARD, K.BACKWARD):
                assert {event.unit, order.root} <= whole


def test_a_unit_far_above_the_median_has_a_slot_of_its_own():
    nbytes = {"root": 5, "embed": 100, "a": 10, "b": 10, "c": 12}
    buffers = assign_unshard_buffers(nbytes, "root", ("embed", "a", "b", "c"), 1)
    assert [(slot.nbytes, slot.units, slot.is_permanent) for slot in buffers] == [
        (5, ("root",), False), (100, ("embed",), False), (12, ("a", "c"), True), (10, ("b",), True),
    ]  # fmt: skip


def test_no_shard_only_holds_and_reduces():
    order = UnitOrder("root", ("a", "b"))
    schedule = Schedule(order, STRATEGIES["no_shard"], Prefetch(), of_one_byte(order))
    events = step_events(schedule, (False, True))
    reduced = "reduce b, reduced b, reduce a, reduced a, reduce root, reduced root"
    assert as_text(events) == f"hold b, hold a, hold root, {reduced}"


def test_a_second_collective_is_waited_for_when_the_next_one_starts():
    order = UnitOrder("root", ("a", "b"), frozen=frozenset({"b"}))
    reductions = replace(of_one_byte(order), combines=True)
    events = step_events(Schedule(order, STRATEGIES["no_shard"], Prefetch(), reductions))
    combined = "reduced root, combined a, combine root, combined root"
    assert as_text(events) == f"reduce a, reduced a, combine a, reduce root, {combined}"


@pytest.mark.parametrize("in_flight", [1, 2])
def test_reductions_in_flight_are_bounded(in_flight):
    order = UnitOrder("root", ("a", "b", "c"))
    reductions = of_one_byte(order, budget=in_flight)
    events = step_events(Schedule(order, STRATEGIES["full_shard"], Prefetch(), reductions))
    change = {K.REDUCE: 1, K.REDUCED: -1}
    assert max(itertools.accumulate(change.get(event.kind, 0) for event in events)) == in_flight


def test_small_units_are_reduced_together_within_the_bytes_of_the_largest():
    order = UnitOrder("root", ("a", "b", "c"))
    reductions = Reductions({"root": 1, "a": 2, "b": 2, "c": 4}, budget=4)
    events = step_events(Schedule(order, STRATEGIES["no_shard"], Prefetch(), reductions))
    assert as_text(events) == (
        "reduce c, reduced c, reduce b, reduce a, reduced b, reduce root, reduced a, reduced root"
    )


@pytest.mark.parametrize(("itemsize", "budget"), [(4, 512), (2, 512), (8, 1024)])
def test_two_reductions_of_two_bytes_fit_like_one_of_four(itemsize, budget):
    units = (UnitSpec("root", "root", ()), UnitSpec("a", "block", (ParamSpec("a", (128,)),)))
    division = lay_out(units, STRATEGIES["no_shard"], 1, 1, "even")
    dtypes = Precision(reduce_dtype={2: "bfloat16", 4: "float32", 8: "float64"}[itemsize])
    plan = StepPlan(division, MeshPosition(0, 1, 1, Transport.GLOO), dtypes).reductions
    assert (plan.nbytes, plan.budget) == ({"root": 0, "a": 128 * itemsize}, budget)


@given(orders, prefetches)
def test_a_unit_that_its_slot_still_has_is_not_gathered_again(order, prefetch):
    nbytes = dict.fromkeys(("root", *order.forward), 10)
    buffers = assign_unshard_buffers(nbytes, "root", order.forward, prefetch.depth)
    full = STRATEGIES["full_shard"]
    again = step_events(Schedule(order, full, prefetch, of_one_byte(order)))
    events = step_events(Schedule(order, full, prefetch, of_one_byte(order), buffers))
    gathers = ((event for event in each if event.kind is K.GATHER) for each in (again, events))
    before, after = ([event.unit for event in each] for each in gathers)
    # The last unit stays unsharded, and as many units before it as there are other buffers.
    unsharded = order.forward[-1 - prefetch.depth : -1]
    saved = [unit for unit in unsharded if unit not in order.lookups]
    assert sorted([*after, *saved]) == sorted(before)
    whole: set[str] = set()
    for event in events:
        if event.kind is K.READY:
            whole.add(event.unit)
        elif event.kind is K.FREE:
            whole.remove(event.unit)
