"""Gradients and buffers in host memory that the device copies from or to."""

from collections.abc import Callable

import torch
from torch import Tensor

from fsdpctl.comm.host import Copier, HostWorker, Moment, wait_for
from fsdpctl.comm.shards import LeftGradient, gradient_norms
from fsdpctl.engine.buffer import UnitBuffer
from fsdpctl.engine.unit import ShardedUnit
from fsdpctl.plan.step import HOST_BUFFERS


class Ring:
    """Pinned buffers that are used in turn."""

    def __init__(self, worker: HostWorker, nbytes: int) -> None:
        self._slots: list[Tensor] = []
        if nbytes:
            slab = worker.allocate(HOST_BUFFERS * nbytes, torch.uint8, pinned=True)
            self._slots = list(slab.split(nbytes))
        self._busy: list[Moment] = [None] * HOST_BUFFERS
        self._next = 0

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers."""
        return sum(each.nbytes for each in self._slots)

    def take(self, numel: int, dtype: torch.dtype) -> tuple[int, Tensor]:
        """Return the number of the next buffer and a window of it, once the device has read it."""
        number = self._next
        self._next = (number + 1) % HOST_BUFFERS
        event, self._busy[number] = self._busy[number], None
        if event is not None:
            event.synchronize()
        return number, self._slots[number][: numel * dtype.itemsize].view(dtype)

    def use(self, number: int, until: Moment) -> None:
        """Keep a buffer until the device has passed an event."""
        self._busy[number] = until


class HostGradients:
    """Takes the reduced gradients of units to the host, one unit at a time during backward."""

    def __init__(self, copier: Copier, place: Callable[[UnitBuffer], Tensor]) -> None:
        """`place` returns the host memory for a buffer's gradient."""
        self._copier = copier
        self._place = place
        self._unit: ShardedUnit | None = None

    @torch.no_grad()
    def start(self, unit: ShardedUnit) -> None:
        """Start to send a unit's gradients, added to those that the host has."""
        self._unit = unit
        for buffer in unit.trained_buffers:
            shard = buffer.shard
            gradient = shard.grad
            if gradient is None:
                continue
            if shard.left is not None:
                before = torch.empty_like(gradient)
                wait_for(shard.left.arrived)
                wait_for(self._copier.up(before, shard.left.values))
                gradient.add_(before)
            (norm,) = gradient_norms([gradient])
            target = self._place(buffer)
            shard.left = LeftGradient(target, norm, self._copier.down(target, gradient))

    def finish(self) -> ShardedUnit | None:
        """Free the gradients on the device that were sent last; return their unit."""
        unit, self._unit = self._unit, None
        for buffer in () if unit is None else unit.trained_buffers:
            if buffer.shard.left is not None:
                wait_for(buffer.shard.left.arrived)
            buffer.shard.grad = None
        return unit
