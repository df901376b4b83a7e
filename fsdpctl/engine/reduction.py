"""From the gradients of a unit's parameters to this rank's part of their mean.

When a unit's backward is over, one fused copy moves (and casts) its gradients into a buffer that
exists only until the reduction is done. Copying each as it arrives would take that buffer while the
unit's backward has just begun, and with it the memory in which the previous reduction overlaps.

All ranks start the reductions in the same order, the plan's. What did not arrive counts as zero.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdpctl.comm.base import Handle
from fsdpctl.comm.mesh import Mesh
from fsdpctl.engine.ledger import Ledger
from fsdpctl.engine.unit import ShardedUnit, UnitBuffer
from fsdpctl.plan.schedule import Buffer, EventKind


@dataclass(slots=True)
class _InFlight:
    unit: ShardedUnit
    handles: list[Handle]  # of its trained buffers, in order


class GradientReducer:
    """Reduces units in the plan's order, a bounded number of them at a time."""

    def __init__(
        self,
        units: Sequence[ShardedUnit],
        mesh: Mesh,
        reduce_dtypes: dict[torch.dtype, torch.dtype],
        ledger: Ledger,
        *,
        limit: int,
    ) -> None:
        self.units = tuple(units)  # in the order of reduction
        self._mesh = mesh
        self._dtypes = reduce_dtypes  # by the masters' dtype
        self._ledger = ledger
        self._limit = limit
        self._next = 0
        self._reducing: deque[_InFlight] = deque()
        self._combining: deque[_InFlight] = deque()  # what follows where a part is not enough

    def collect(self, unit: ShardedUnit) -> None:
        """Move the gradients that have arrived out of the parameters, and hold them."""
        for index, buffer in enumerate(unit.trained_buffers):
            if buffer.arrived:
                self._hold(unit, index, buffer)

    def advance(self, last: ShardedUnit | None = None) -> None:
        """Start the reductions up to that of `last`, or all that are left."""
        stop = len(self.units) if last is None else self.units.index(last) + 1
        while self._next < stop:
            self._start(self.units[self._next])
            self._next += 1

    def finish(self) -> None:
        """Wait until every started reduction has ended, and begin anew."""
        while self._reducing:
            self._finish_oldest()
        while self._combining:
            self._finish_combining()
        self._next = 0

    def abandon(self) -> None:
        """Forget a backward that did not end: its gradients, and what was in flight."""
        for started in (*self._reducing, *self._combining):
            for index, handle in enumerate(started.handles):
                handle.wait()
                for buffer in (Buffer.WHOLE_GRADS, Buffer.WORKSPACE, Buffer.SUM):
                    self._ledger.free(buffer, started.unit.name, index)
        self._reducing.clear()
        self._combining.clear()
        self._next = 0
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget all gradients that are not in flight."""
        for unit in self.units:
            for index, buffer in enumerate(unit.trained_buffers):
                buffer.drop_gradients()
                self._ledger.free(Buffer.WHOLE_GRADS, unit.name, index)
                self._ledger.free(Buffer.GRADS, unit.name, index)

    def _start(self, unit: ShardedUnit) -> None:
        if not unit.trained_buffers:
            return
        while len(self._reducing) >= self._limit:
            self._finish_oldest()
        started = _InFlight(unit, [])
        self._reducing.append(started)  # before its first collective: one that fails loses none
        sent = 0
        for index, buffer in enumerate(unit.trained_buffers):
            self._hold(unit, index, buffer)
            gradients, buffer.held_gradients = buffer.held_gradients, None
            assert gradients is not None
            sent += gradients.nbytes
            handle = self._mesh.shard.reduce_scatter(gradients, buffer.layout.parts)
            started.handles.append(handle)
            if handle.workspace_nbytes:
                nbytes = handle.workspace_nbytes
                self._ledger.allocate(Buffer.WORKSPACE, unit.name, index, nbytes)
        self._ledger.note(EventKind.REDUCE, unit.name, sent)

    def _finish_oldest(self) -> None:
        started = self._reducing.popleft()
        unit = started.unit
        handles, started.handles = started.handles, []
        sums = [self._take_sum(unit, index, handles.pop(0)) for index in range(len(handles))]
        if not (self._mesh.replicas or any(b.shard.is_replicated for b in unit.trained_buffers)):
            for index, total in enumerate(sums):
                self._add_gradient(unit, index, total)
            self._ledger.note(EventKind.REDUCED, unit.name)
            return
        self._ledger.note(EventKind.REDUCED, unit.name)
        while len(self._combining) >= self._limit:
            self._finish_combining()
        started.handles = [
            self._combine(buffer, total)
            for buffer, total in zip(unit.trained_buffers, sums, strict=True)
        ]
        self._ledger.note(EventKind.COMBINE, unit.name, sum(total.nbytes for total in sums))
        self._combining.append(started)

    @torch.no_grad()
    def _take_sum(self, unit: ShardedUnit, index: int, handle: Handle) -> Tensor:
        """This rank's part of the mean as a tensor of its own, so that the buffers can go.

        Where every rank keeps the whole gradient, the part lies where it belongs in that.
        """
        shard = unit.trained_buffers[index].shard
        total = handle.wait()
        ranks = self._mesh.world.size
        release = Buffer.WORKSPACE if handle.workspace_nbytes else Buffer.WHOLE_GRADS
        if handle.workspace_nbytes:  # the collective has let go of the gradients
            self._ledger.free(Buffer.WHOLE_GRADS, unit.name, index)
        if ranks == 1 and total.dtype == shard.master.dtype:
            self._ledger.free(release, unit.name, index)
            self._ledger.allocate(Buffer.SUM, unit.name, index, total.nbytes)
            return total
        mean = torch.empty_like(shard.master)
        self._ledger.allocate(Buffer.SUM, unit.name, index, mean.nbytes)
        part = shard.view(mean, shard.owned)
        if part.dtype == total.dtype:
            torch.mul(total, 1 / ranks, out=part)
        else:
            part.copy_(total).mul_(1 / ranks)
        self._ledger.free(release, unit.name, index)
        return mean

    def _combine(self, buffer: UnitBuffer, total: Tensor) -> Handle:
        if buffer.shard.is_replicated:
            return self._mesh.shard.all_gather(total, buffer.layout.parts, None)
        assert self._mesh.replicas is not None
        return self._mesh.replicas.start_all_reduce(total)

    def _finish_combining(self) -> None:
        started = self._combining.popleft()
        for index, handle in enumerate(started.handles):
            self._add_gradient(started.unit, index, handle.wait())
        self._ledger.note(EventKind.COMBINED, started.unit.name)

    @torch.no_grad()
    def _add_gradient(self, unit: ShardedUnit, index: int, gradient: Tensor) -> None:
        shard = unit.trained_buffers[index].shard
        self._ledger.free(Buffer.SUM, unit.name, index)
        if shard.grad is None:
            shard.grad = gradient
            self._ledger.allocate(Buffer.GRADS, unit.name, index, gradient.nbytes)
        else:
            shard.grad.add_(gradient)

    @torch.no_grad()
    def _hold(self, unit: ShardedUnit, index: int, buffer: UnitBuffer) -> None:
        """Add what has arrived to the held gradients; zeros where nothing ever did."""
        arrived = sorted(buffer.arrived)
        if buffer.held_gradients is None:
            buffer.held_gradients = self._first_gradients(buffer, arrived)
            nbytes = buffer.held_gradients.nbytes
            self._ledger.allocate(Buffer.WHOLE_GRADS, unit.name, index, nbytes)
        elif arrived:
            views = buffer.param_views(buffer.held_gradients)
            targets = [views[index] for index in arrived]
            torch._foreach_add_(targets, _gradients(buffer, arrived))
        for number in arrived:
            buffer.params[number].grad = None
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
