"""From the gradients of a unit's parameters to this rank's part of their mean.

When a unit's backward is over, one fused copy moves (and casts) its gradients into a buffer that
exists only until the reduction is done. Copying each as it arrives would take that buffer while the
unit's backward has just begun, and with it the memory in which the previous reduction overlaps.

All ranks start the reductions in the same order, the plan's. What did not arrive counts as zero.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdpctl.comm.base import Handle
from fsdpctl.comm.mesh import Mesh
from fsdpctl.engine.unit import ShardedUnit, UnitBuffer
from fsdpctl.plan.schedule import EventKind

Note = Callable[[EventKind, str], None]


@dataclass(slots=True)
class _InFlight:
    unit: str
    reductions: list[tuple[UnitBuffer, Handle]]


class GradientReducer:
    """Reduces units in the plan's order, a bounded number of them at a time."""

    def __init__(
        self,
        units: Sequence[ShardedUnit],
        mesh: Mesh,
        reduce_dtypes: dict[torch.dtype, torch.dtype],
        note: Note,
        *,
        limit: int,
    ) -> None:
        self.units = tuple(units)  # in the order of reduction
        self._mesh = mesh
        self._dtypes = reduce_dtypes  # by the masters' dtype
        self._note = note
        self._limit = limit
        self._next = 0
        self._in_flight: deque[_InFlight] = deque()
        self._second_stage: list[tuple[UnitBuffer, Handle]] = []  # after the reduce-scatter

    def collect(self, unit: ShardedUnit) -> None:
        """Move the gradients that have arrived out of the parameters, and hold them."""
        for buffer in unit.trainable_buffers:
            if buffer.arrived:
                self._hold(buffer)

    def advance(self, last: ShardedUnit | None = None) -> None:
        """Start the reductions up to that of `last`, or all that are left."""
        stop = len(self.units) if last is None else self.units.index(last) + 1
        while self._next < stop:
            self._start(self.units[self._next])
            self._next += 1

    def finish(self) -> None:
        """Wait until every started reduction has ended, and begin anew."""
        while self._in_flight:
            self._finish_oldest()
        for buffer, handle in self._second_stage:
            _add_gradient(buffer, handle.wait())
        self._second_stage = []
        self._next = 0

    def abandon(self) -> None:
        """Forget a backward that did not end: its gradients, and what was in flight."""
        for started in self._in_flight:
            for _, handle in started.reductions:
                handle.wait()
        self._in_flight.clear()
        for _, handle in self._second_stage:
            handle.wait()
        self._second_stage = []
        self._next = 0
        for unit in self.units:
            unit.open_calls = 0
            for buffer in unit.trainable_buffers:
                buffer.drop_gradients()

    def _start(self, unit: ShardedUnit) -> None:
        if not unit.trainable_buffers:
            return
        while len(self._in_flight) >= self._limit:
            self._finish_oldest()
        self._note(EventKind.REDUCE, unit.name)
        started = _InFlight(unit.name, [])
        self._in_flight.append(started)  # before its first collective: one that fails loses none
        for buffer in unit.trainable_buffers:
            self._hold(buffer)
            gradients, buffer.held_gradients = buffer.held_gradients, None
            assert gradients is not None
            handle = self._mesh.shard.reduce_scatter(gradients, buffer.layout.parts)
            started.reductions.append((buffer, handle))

    def _finish_oldest(self) -> None:
        started = self._in_flight.popleft()
        for buffer, handle in started.reductions:
            self._take_part(buffer, handle.wait())
        self._note(EventKind.REDUCED, started.unit)

    @torch.no_grad()
    def _take_part(self, buffer: UnitBuffer, total: Tensor) -> None:
        shard = buffer.shard
        size = self._mesh.world.size
        if shard.is_replicated:
            whole = torch.empty_like(shard.master)
            whole[shard.owned.start : shard.owned.stop] = total * (1 / size)
            handle = self._mesh.shard.all_gather(whole, buffer.layout.parts, None)
            self._second_stage.append((buffer, handle))
            return
        # A product is a tensor of its own, so that the reduce buffer can go.
        mean = (total * (1 / size) if size > 1 else total).to(shard.master.dtype)
        if self._mesh.replicas is not None:
            handle = self._mesh.replicas.start_all_reduce(mean)
            self._second_stage.append((buffer, handle))
        else:
            _add_gradient(buffer, mean)

    @torch.no_grad()
    def _hold(self, buffer: UnitBuffer) -> None:
        """Add what has arrived to the held gradients; zeros where nothing ever did."""
        arrived = sorted(buffer.arrived)
        if buffer.held_gradients is None:
            buffer.held_gradients = self._first_gradients(buffer, arrived)
        elif arrived:
            views = buffer.param_views(buffer.held_gradients)
            targets = [views[index] for index in arrived]
            torch._foreach_add_(targets, _gradients(buffer, arrived))
        for index in arrived:
            buffer.params[index].grad = None
        buffer.present |= buffer.arrived
        buffer.arrived.clear()

    def _first_gradients(self, buffer: UnitBuffer, arrived: list[int]) -> Tensor:
        dtype = self._dtypes[buffer.shard.master.dtype]
        flat = torch.empty(buffer.layout.numel, dtype=dtype, device=buffer.whole.device)
        views = buffer.param_views(flat)
        zeros = [flat[gap.start : gap.stop] for gap in buffer.layout.padding]
        zeros += [view for index, view in enumerate(views) if index not in buffer.arrived]
        if zeros:
            torch._foreach_zero_(zeros)
        if arrived:
            torch._foreach_copy_([views[index] for index in arrived], _gradients(buffer, arrived))
        return flat


def _gradients(buffer: UnitBuffer, indices: list[int]) -> list[Tensor]:
    gradients = [buffer.params[index].grad for index in indices]
    return [gradient for gradient in gradients if gradient is not None]


def _add_gradient(buffer: UnitBuffer, gradient: Tensor) -> None:
    shard = buffer.shard
    shard.grad = gradient if shard.grad is None else shard.grad.add_(gradient)
