"""The memory of fsdpctl's engine on a rank, exactly as planned.

Counted are master weights, gradients, optimizer states, gathered parameters and the buffers in
which gradients are reduced, replayed event by event through a step. Not counted are activations,
nor gradients that autograd has made and the engine has not collected yet.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from fsdpctl.plan.layout import FlatLayout
from fsdpctl.plan.reductions import Reductions, Transport
from fsdpctl.plan.replay import Replay
from fsdpctl.plan.schedule import (
    Buffer,
    Event,
    EventKind,
    step_events,
    update_events,
)
from fsdpctl.plan.sizes import (
    Offload,
    RankPlace,
    SlotSpec,
    slots_of,
    unit_bytes,
)
from fsdpctl.plan.states import is_compressible
from fsdpctl.predict.kept_states import KeptStates
from fsdpctl.predict.recorder import CATEGORY_OF
from fsdpctl.predict.training_plan import (
    TrainingPlan,
    at_rest,
    buffer_states_bytes,
    leaving_gradients,
    states_bytes,
    trained_layouts,
)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The bytes of one rank at one moment, with padding."""

    parameters: int  # at rest: master weights, and parts in the compute dtype
    gradients: int  # reduced
    optimizer_states: int
    gathered_units: int  # slots to compute with, without the master weights that are views of them
    reduce_buffers: int

    @property
    def total(self) -> int:
        """The sum of all categories."""
        return sum(self.to_dict().values())

    def to_dict(self) -> dict[str, int]:
        """Return the bytes by category."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Estimate:
    """The memory of the fullest rank."""

    rank: int  # among those that share a replica
    copy: int  # its replica
    breakdown: Breakdown  # at the peak
    largest: Breakdown  # each category at its own peak

    @property
    def peak_bytes(self) -> int:
        """The bytes at the peak."""
        return self.breakdown.total


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """The memory of a rank after an event of a step, or before the first."""

    event: Event | None
    held: Breakdown


def estimate(plan: TrainingPlan, place: RankPlace) -> Estimate:
    """Return the peak of the rank that needs the most memory; the rank of `place` is ignored."""
    candidates = fullest_ranks(plan, place)
    places = [replace(place, rank=rank, copy=copy) for rank, copy in candidates]
    return max((_estimate_rank(plan, each) for each in places), key=lambda each: each.peak_bytes)


def _estimate_rank(plan: TrainingPlan, place: RankPlace) -> Estimate:
    moments = list(timeline(plan, place))
    peak = max(moments, key=lambda moment: moment.held.total)
    of_each = zip(*(moment.held.to_dict().values() for moment in moments), strict=True)
    largest = Breakdown(*(max(values) for values in of_each))
    return Estimate(place.rank, place.copy, peak.held, largest)


def fullest_ranks(plan: TrainingPlan, place: RankPlace) -> list[tuple[int, int]]:
    """Return the ranks that may need the most memory, each with its replica."""
    flats = [layout for of_unit in plan.layouts.values() for layout in of_unit]
    if not all(layout.is_even for layout in flats):
        return [(rank, 0) for rank in range(len(flats[0].parts))]
    # They differ only by the optimizer states of unlike parameters: some have more states.
    numbers = {rank for layout in flats for rank in _unlike_ranks(layout, plan.states)}
    candidates = [divmod(rank, flats[0].shares) for rank in sorted({0, *numbers})]
    if plan.states.dtype is None:
        return candidates  # one more counter
    places = [replace(place, rank=rank, copy=copy) for rank, copy in candidates]
    totals = [0] * len(places)
    for layout, count in _unlike_layouts(plan):
        for number, each in enumerate(places):
            totals[number] += count * buffer_states_bytes(plan, each, layout)
    return [candidates[totals.index(max(totals))]]


def _unlike_layouts(plan: TrainingPlan) -> Iterator[tuple[FlatLayout, int]]:
    """Yield one of each kind of trained flat buffers with equal states, and their number."""
    alike: dict[object, list[FlatLayout]] = {}
    for layout in trained_layouts(plan.layouts):
        cut = [
            (x.span, plan.states.key(x.param), plan.states.is_alone(x.param))
            for x in layout.placements
        ]
        alike.setdefault((layout.numel, *cut), []).append(layout)
    yield from ((layouts[0], len(layouts)) for layouts in alike.values())


def _unlike_ranks(layout: FlatLayout, states: KeptStates) -> Iterator[int]:
    """Yield the parts of an even buffer where parameters meet whose states are kept apart.

    Also those in the middle of a parameter whose states have more bytes than those of others.
    """
    size = layout.owned_parts[0].numel
    for before, after in pairwise(layout.placements):
        if states.key(before.param) != states.key(after.param):
            yield after.span.start // size
    if states.dtype is not None:
        for each in layout.placements:
            if not is_compressible(each.param) and each.span.numel:
                yield from range(each.span.start // size, (each.span.stop - 1) // size + 1)


def plan_slots(plan: TrainingPlan) -> tuple[SlotSpec, ...]:
    """Return the slots that the units are gathered into."""
    nbytes = {
        name: sum(layout.numel * plan.sizes.gathered(layout) for layout in of_unit)
        for name, of_unit in plan.layouts.items()
    }
    root, *others = nbytes
    return slots_of(plan.strategy, nbytes, root, others, plan.prefetch.depth)


def planned_step(plan: TrainingPlan, place: RankPlace) -> list[Event]:
    """Return the events of a step, with their bytes and buffers."""
    slots, combines = plan_slots(plan), place.transfers(plan.strategy).combines
    replay, reductions = _replay(plan, place)
    events = step_events(
        plan.order,
        plan.strategy,
        plan.prefetch,
        reduces=plan.reduces,
        reductions=reductions,
        shared_slots=[slot.units for slot in slots if slot.resident],
        combines=combines,
    )
    played = replay.play(events)
    return list(_after_host(played, _host_waits(plan, place))) if plan.steps_on_host else played


def planned_update(plan: TrainingPlan, place: RankPlace) -> list[Event]:
    """Return the events that follow the optimizer's step."""
    return [] if plan.steps_on_host else _renewing(plan, place)


def _renewing(plan: TrainingPlan, place: RankPlace) -> list[Event]:
    events = update_events(plan.order, plan.strategy)
    return _replay(plan, place)[0].play(events) if events else []


def _reductions(plan: TrainingPlan, place: RankPlace) -> Reductions:
    sizes = plan.sizes
    return place.transfers(plan.strategy).reductions(
        plan.layouts, plan.order, lambda _: sizes.reduce, same_dtype=sizes.reduce == sizes.grad
    )


def outbox_bytes(plan: TrainingPlan, place: RankPlace) -> int:
    """Return the bytes of a rank's gradients in shared memory, where other ranks read them."""
    shares = place.transport is Transport.SHARED
    return _reductions(plan, place).most_in_flight if shares else 0


def shared_bytes(plan: TrainingPlan, place: RankPlace) -> int:
    """Return the bytes that all ranks share: parameters, and gradients to be read."""
    if place.transport is not Transport.SHARED:
        return 0
    outboxes = place.size * outbox_bytes(plan, place)
    return sum(slot.nbytes for slot in plan_slots(plan)) + outboxes


def _replay(plan: TrainingPlan, place: RankPlace) -> tuple[Replay, Reductions]:
    transfers, reductions = place.transfers(plan.strategy), _reductions(plan, place)
    slots = plan_slots(plan)
    units = unit_bytes(plan.layouts, slots, plan.strategy, plan.sizes, place, reductions)
    replay = Replay(
        units,
        combines=transfers.combines,
        chained=transfers.chained > 0,
        leaves=plan.offload is Offload.ALL,
    )
    return replay, reductions


def timeline(plan: TrainingPlan, place: RankPlace) -> Iterator[PlannedMemory]:
    """Yield the memory of a rank throughout a step, after the first one."""
    states = 0 if plan.steps_on_host else states_bytes(plan, place)
    stay = not plan.strategy.shards_params
    always = sum(place.share_of(slot.nbytes) for slot in plan_slots(plan) if slot.resident or stay)
    parameters = 0
    for layout in (layout for of_unit in plan.layouts.values() for layout in of_unit):
        kept = at_rest(plan, place, layout)
        parameters += kept.part + kept.masters + kept.views + kept.remainder
        always -= kept.views
    leaving = leaving_gradients(plan, place)
    held = {"gathered_units": always, "gradients": sum(map(sum, leaving.values()))}
    held["reduce_buffers"] = outbox_bytes(plan, place)
    now = Breakdown(parameters=parameters, optimizer_states=states, **held)
    yield PlannedMemory(None, now)
    for event in planned_step(plan, place):
        if event.buffer is not None:
            change = event.nbytes if event.kind is EventKind.ALLOCATE else -event.nbytes
            held[CATEGORY_OF[event.buffer].value] += change
            now = Breakdown(parameters=parameters, optimizer_states=states, **held)
        yield PlannedMemory(event, now)


def _host_waits(plan: TrainingPlan, place: RankPlace) -> dict[str, list[Event]]:
    """Return the events once the host has stepped a unit, by unit."""
    waits = {
        unit: [Event(EventKind.FREE, unit, nbytes, Buffer.LEAVING) for nbytes in of_unit]
        for unit, of_unit in leaving_gradients(plan, place).items()
    }
    for event in _renewing(plan, place):
        waits.setdefault(event.unit, []).append(event)
    return waits


def _after_host(events: Iterable[Event], waits: dict[str, list[Event]]) -> Iterator[Event]:
    """Yield events, and those for which the engine waits before it gathers or uses a unit."""
    for event in events:
        gathers = event.kind is EventKind.ALLOCATE and event.buffer is Buffer.PARAMS
        if gathers or event.kind in (EventKind.GATHER, EventKind.FORWARD):
            yield from waits.pop(event.unit, ())
        yield event
