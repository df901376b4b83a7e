"""The units whose parameters take memory, by event."""

from collections.abc import Sequence

from fsdpctl.plan.schedule import Event, EventKind


def most_whole_units(events: Sequence[Event]) -> list[frozenset[str]]:
    """Return the units whose parameters take memory after each event."""
    alive: set[str] = set()
    states = []
    for event in events:
        if event.kind in (EventKind.GATHER, EventKind.READY):
            alive.add(event.unit)
        elif event.kind is EventKind.RELEASE:
            alive.discard(event.unit)
        states.append(frozenset(alive))
    return states
