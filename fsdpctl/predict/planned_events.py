"""The events of a step of fsdpctl's engine, with their bytes and buffers."""

from collections.abc import Iterable, Iterator

from fsdpctl.plan.offload import Offload
from fsdpctl.plan.reductions import Reductions, Transport
from fsdpctl.plan.replay import Replay
from fsdpctl.plan.schedule import Buffer, Event, EventKind, Schedule, step_events, update_events
from fsdpctl.plan.sizes import RankPlace, SlotSpec, slots_of, unit_bytes
from fsdpctl.predict.training_plan import TrainingPlan, leaving_gradients


def plan_slots(plan: TrainingPlan) -> tuple[SlotSpec, ...]:
    """Return the slots that the units are gathered into."""
    return slots_of(plan.strategy, plan.layouts, plan.sizes.gathered, plan.prefetch.depth)


def planned_step(plan: TrainingPlan, place: RankPlace) -> list[Event]:
    """Return the events of a step, with their bytes and buffers."""
    reductions, slots = _reductions(plan, place), plan_slots(plan)
    schedule = Schedule(plan.order, plan.strategy, plan.prefetch, reductions, slots)
    played = _replay(plan, place).play(step_events(schedule, plan.reduces))
    return list(_after_host(played, _host_waits(plan, place))) if plan.steps_on_host else played


def planned_update(plan: TrainingPlan, place: RankPlace) -> list[Event]:
    """Return the events that follow the optimizer's step."""
    return [] if plan.steps_on_host else _renewing(plan, place)


def _renewing(plan: TrainingPlan, place: RankPlace) -> list[Event]:
    events = update_events(plan.order, plan.strategy)
    return _replay(plan, place).play(events) if events else []


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


def _replay(plan: TrainingPlan, place: RankPlace) -> Replay:
    reductions, slots = _reductions(plan, place), plan_slots(plan)
    units = unit_bytes(plan.layouts, slots, plan.strategy, plan.sizes, place, reductions)
    return Replay(units, reductions, leaves=Offload.GRADIENTS in plan.offload)


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
