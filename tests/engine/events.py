"""The events of a sharded model, and its unsharded parameters."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.plan.schedule import Event, EventKind


@contextmanager
def recording(model: ShardedModel) -> Iterator[list[Event]]:
    """Record collectives, allocations and frees in a `with` block."""
    trace: list[Event] = []
    model.accounting.trace = trace
    try:
        yield trace
    finally:
        model.accounting.trace = None


def gathered_nbytes(model: ShardedModel) -> int:
    """Return the bytes that are allocated for gathered parameters now."""
    buffers = {unit.unshard_buffer for unit in model._runtime.units.values()}
    return sum(buffer.allocated_nbytes for buffer in buffers)


def unsharded_units(events: Sequence[Event]) -> list[frozenset[str]]:
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
