"""What a sharded model does and holds while it runs."""

from collections.abc import Iterator
from contextlib import contextmanager

from fsdpctl.engine.model import ShardedModel
from fsdpctl.plan.schedule import Event


@contextmanager
def recording(model: ShardedModel) -> Iterator[list[Event]]:
    """Record collectives, allocations and frees in the block, in a growing list."""
    trace: list[Event] = []
    model.ledger.trace = trace
    try:
        yield trace
    finally:
        model.ledger.trace = None


def gathered_nbytes(model: ShardedModel) -> int:
    """The bytes that are allocated for gathered parameters now."""
    slots = {id(unit.slot): unit.slot for unit in model._runtime.units.values()}
    return sum(slot.allocated_nbytes for slot in slots.values())
