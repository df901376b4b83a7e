"""The life of one unit: at rest, gathering, whole, at rest again.

Note: why version counters move. Autograd checks that a saved parameter has the version it had in
forward. A released unit's version is one higher, so a backward that would read memory which now
holds another unit raises instead; gathering the unit again makes the saved version right.
"""

from collections.abc import Sequence
from enum import Enum, auto

import torch

from fsdpctl.comm.base import Collectives, Gathering, Handle
from fsdpctl.engine.buffer import UnitBuffer
from fsdpctl.engine.slots import Slot

_set_versions = torch._C._autograd._unsafe_set_version_counter


class State(Enum):
    """Where a unit's parameters are."""

    AT_REST = auto()  # they are this rank's part or less; reading one gives NaN
    GATHERING = auto()  # an all-gather is in flight
    WHOLE = auto()


class ShardedUnit:
    """Parameters that are gathered, freed and reduced together."""

    def __init__(self, name: str, buffers: Sequence[UnitBuffer], slot: Slot) -> None:
        self.name = name
        self.buffers = tuple(buffers)
        self.slot = slot
        self.state = State.AT_REST
        self.is_running = False  # its forward has begun and not ended
        self.was_used_in_backward = False  # in the running one
        self._gather: Handle | None = None
        self._params = tuple(param for buffer in buffers for param in buffer.params)
        self._version = max((param._version for param in self._params), default=0)
        self.trained_buffers = tuple(each for each in self.buffers if each.shard.trainable)

    @property
    def nbytes(self) -> int:
        """Bytes of its parameters when they are whole, padding included."""
        return sum(buffer.whole.nbytes for buffer in self.buffers)

    def start_gather(self, collectives: Collectives) -> None:
        """Start to make it whole. The slot must be free."""
        assert self.state is State.AT_REST
        assert self.slot.owner is None
        self.slot.take(self.name)
        self.state = State.GATHERING
        if self.buffers:
            wanted = [Gathering(each.whole, each.layout.parts, each.part) for each in self.buffers]
            self._gather = collectives.gather_together(wanted)

    def finish_gather(self) -> None:
        """Wait for the gather; afterwards the parameters can be read."""
        assert self.state is State.GATHERING
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
        self.slot.content = self.name
        self.become_whole()

    def take_back(self) -> None:
        """Become whole without a gather: the slot still has the values. It must be free."""
        assert self.slot.content == self.name
        assert self.slot.owner is None
        self.slot.owner = self.name
        self.become_whole()

    def become_whole(self) -> None:
        """The slot holds the parameters: let them be read."""
        for buffer in self.buffers:
            buffer.point_to_whole()
        self.state = State.WHOLE
        self._set_version(self._version)

    def release(self) -> None:
        """Give the slot back. The ranks' parts keep the values."""
        if self.state is State.GATHERING:
            self.finish_gather()
        assert self.state is State.WHOLE
        self.rest()
        self.state = State.AT_REST

    def rest(self) -> None:
        """Keep nothing but this rank's part."""
        for buffer in self.buffers:
            buffer.point_to_rest()
        self._set_version(self._version + 1)
        self.slot.give_back()

    def masters_changed(self) -> None:
        """Make every graph that saved the old values invalid."""
        self._version += 2
        self._set_version(self._version + (self.state is not State.WHOLE))

    def _set_version(self, version: int) -> None:
        _set_versions(self._params, (version,) * len(self._params))


def bytes_beside_slots(units: Sequence[ShardedUnit]) -> int:
    """Of parts and masters that lie in memory of their own, not in what units are gathered into."""
    buffers = [buffer for unit in units for buffer in unit.buffers]
    values = [each for buffer in buffers for each in (buffer.part, buffer.shard.master)]
    storages = [each.untyped_storage() for each in values]
    # Masters may be windows into parts, and both into slots.
    found = {each.data_ptr(): each.nbytes() for each in storages if each.nbytes()}
    slots = {unit.slot.address for unit in units}
    return sum(nbytes for address, nbytes in found.items() if address not in slots)
