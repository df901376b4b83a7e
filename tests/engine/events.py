"""What a sharded model does and holds while it runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.plan.schedule import Event, EventKind


@contextmanager
def recording(model: ShardedModel) -> Iterator[list[Event]]:
    """Record collectives, allocations and frees in the block, in a growing list."""
    trace: list[Event] = []
    model.accounting.trace = trace
    try:
        yield trace
    finally:
        model.accounting.trace = None


def gathered_nbytes(model: ShardedModel) -> int:
    """The bytes that are allocated for gathered parameters now."""
    slots = {id(unit.unshard_buffer): unit.unshard_buffer for unit in model._runtime.units.values()}
    return sum(slot.allocated_nbytes for slot in slots.values())


def most_whole_units(events: Sequence[Event]) -> list[frozenset[str]]:
    """Return the units whose parameters take memory after each event."""
    alive: set[str] = set()
    states = []
    for event in events:
        if event.kind in (EventKind.GATHER, EventKind.READY):
            alive.add(event.unit)
        elif event.kind is EventKind.FREE:
            alive.discard(event.unit)
        states.append(frozenset(alive))
    return states
