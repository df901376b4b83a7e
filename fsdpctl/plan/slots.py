"""Which storage each unit is gathered into.

A slot is memory that several units use one after another: a unit always returns to the same one,
so that views of its parameters which autograd saved in forward are valid again in backward. A unit
far larger than the others, and the root, which is whole all the time, have a slot to themselves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from fsdpctl.plan.strategy import Strategy

_OVERSIZE = 2  # a unit above this multiple of the median block would blow up a shared slot


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """One slot: its size and the units that use it."""

    nbytes: int
    units: tuple[str, ...]
    resident: bool  # allocated for good; otherwise only while its unit is whole


def assign_slots(
    nbytes: Mapping[str, int], root: str, forward: Sequence[str], depth: int
) -> tuple[SlotSpec, ...]:
    """Slots for units of the given sizes, of which `depth + 1` are whole at a time.

    Args:
        nbytes: bytes of each unit's gathered parameters.
        root: the unit that is whole from forward to the end of backward.
        forward: the other units in the order of their forward.
        depth: how many units are gathered ahead of the running one.
    """
    limit = _OVERSIZE * median([nbytes[unit] for unit in forward]) if forward else 0
    alone = [unit for unit in forward if nbytes[unit] > limit]
    shared = [unit for unit in forward if nbytes[unit] <= limit]
    own = [SlotSpec(nbytes[unit], (unit,), resident=False) for unit in (root, *alone)]
    count = min(depth + 1, len(shared))
    members = [tuple(shared[index::count]) for index in range(count)]
    common = [SlotSpec(max(nbytes[u] for u in units), units, resident=True) for units in members]
    return (*own, *common)


def slots_of(
    strategy: Strategy, nbytes: Mapping[str, int], root: str, forward: Sequence[str], depth: int
) -> tuple[SlotSpec, ...]:
    """The slots under a strategy; one that never reshards before backward shares none."""
    if strategy.reshard_after_forward:
        return assign_slots(nbytes, root, forward, depth)
    return tuple(SlotSpec(nbytes[name], (name,), resident=False) for name in (root, *forward))
