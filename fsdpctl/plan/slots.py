"""The memory that each unit is gathered into.

A slot is memory that several units use one after another: a unit always returns to the same one,
so that views of its parameters which autograd saved in forward are valid again in backward. A unit
far larger than the others, and the root, which is always unsharded, have a slot to themselves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from fsdpctl.plan.strategy import Strategy

_OVERSIZE = 2  # a unit above this multiple of the median would enlarge a shared slot


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """One slot: its size and the units that use it."""

    nbytes: int
    units: tuple[str, ...]
    resident: bool  # always allocated; otherwise only while its unit is unsharded


def assign_slots(
    nbytes: Mapping[str, int], root: str, forward: Sequence[str], depth: int
) -> tuple[SlotSpec, ...]:
    """Assign slots to units of the given sizes, of which `depth + 1` are unsharded at a time.

    Args:
        nbytes: bytes of each unit's gathered parameters.
        root: the unit that is unsharded from forward to the end of backward.
        forward: the other units in forward order.
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
    """Return the slots under a strategy; they are shared only if it reshards after forward."""
    if strategy.reshard_after_forward:
        return assign_slots(nbytes, root, forward, depth)
    return tuple(SlotSpec(nbytes[name], (name,), resident=False) for name in (root, *forward))
