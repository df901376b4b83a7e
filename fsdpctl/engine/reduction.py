"""From the gradients of a unit's parameters to this rank's part of their mean.

Where ranks send each other gradients as they are, nothing is copied. Elsewhere one fused copy moves
(and casts) a unit's gradients into a buffer, when its backward is over, that exists only until the
reduction is done. Copying each as it arrives would take that buffer while the unit's backward has
just begun, and with it the memory in which the previous reduction overlaps. Only where linear
layers write gradients themselves is it there so early; those are no tensors of their own then.

All ranks start the reductions in the same order, the plan's. What did not arrive counts as zero.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsdpctl.comm.base import Handle, InPlace, Reduction, Stretches
from fsdpctl.comm.mesh import Mesh
from fsdpctl.engine.buffer import UnitBuffer
from fsdpctl.engine.ledger import Ledger
from fsdpctl.engine.unit import ShardedUnit
from fsdpctl.plan.layout import Span
from fsdpctl.plan.reductions import Reductions
from fsdpctl.plan.schedule import Buffer, EventKind


@dataclass(slots=True)
class _Reducing:
    """A unit whose gradients are on their way."""

    unit: ShardedUnit
    # Of its trained buffers, in order, each with the one tensor that it works on, if there is one.
    reductions: list[tuple[Reduction, Tensor | None]] = field(default_factory=list)


@dataclass(slots=True)
class _Combining:
    """A unit whose parts are on their way to those who need more than their own."""

    unit: ShardedUnit
    handles: list[Handle]


class GradientReducer:
    """Reduces units in the plan's order, a bounded number of bytes at a time."""

    def __init__(
        self,
        units: Sequence[ShardedUnit],
        mesh: Mesh,
        reduce_dtypes: dict[torch.dtype, torch.dtype],
        plan: Reductions,
        *,
        early: Collection[str],
        wire_dtype: torch.dtype | None,
        narrows: bool,
    ) -> None:
        """`early`: the units whose reduction others' backward follows.

        `wire_dtype`: of gradients of one backward; None: what loses nothing and serves the backend.
        `narrows`: it may be another than they are added in. Only where all ranks go through the
        same backwards, because what was held has that.
        """
        self.units = tuple(units)  # in the order of reduction
        self._mesh = mesh
        self._dtypes = reduce_dtypes  # by the masters' dtype
        self.ledger = Ledger()
        self._plan = plan
        self._early = early
        self._wire_dtype = wire_dtype
        self._narrows = narrows
        self._next = 0
        self._reducing: deque[_Reducing] = deque()
        self._combining: deque[_Combining] = deque()  # what follows where a part is not enough

    def dtype_of(self, buffer: UnitBuffer) -> torch.dtype:
        """In which its gradients are collected and added."""
        return self._dtypes[buffer.shard.dtype]

    @torch.no_grad()
    def hold(self, unit: ShardedUnit) -> None:
        """Add the gradients that have arrived to those that wait for a later backward."""
        for index, buffer in enumerate(unit.trained_buffers):
            self._hold(unit, index, buffer, self.dtype_of(buffer))
        self.ledger.note(EventKind.HOLD, unit.name)

    @torch.no_grad()
    def advance(self, last: ShardedUnit | None = None) -> None:
        """Start the reductions up to that of `last`, or all that are left."""
        while self._next < len(self.units):
            unit = self.units[self._next]
            with self.ledger.ranges.around("reduce", unit.name):
                self._start(unit)
            self._next += 1
            if unit is last:
                return

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until every started reduction has ended, and begin anew."""
        while self._reducing:
            self._finish_oldest()
        while self._combining:
            self._finish_combining()
        self._next = 0

    def abandon(self) -> None:
        """Forget a backward that did not end: its gradients, and what was in flight."""
        for reducing in self._reducing:
            for index, (reduction, _) in enumerate(reducing.reductions):
                reduction.wait()
                self.ledger.free(Buffer.WHOLE_GRADS, reducing.unit.name, index)
                self.ledger.free(Buffer.WORKSPACE, reducing.unit.name, index)
        for combining in self._combining:
            for index, handle in enumerate(combining.handles):
                handle.wait()
                self.ledger.free(Buffer.SUM, combining.unit.name, index)
        self._reducing.clear()
        self._combining.clear()
        self._next = 0
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget all gradients that are not in flight."""
        for unit in self.units:
            for index, buffer in enumerate(unit.trained_buffers):
                buffer.drop_gradients()
                self.ledger.free(Buffer.WHOLE_GRADS, unit.name, index)
                self.ledger.free(Buffer.GRADS, unit.name, index)

    def _start(self, unit: ShardedUnit) -> None:
        if not unit.trained_buffers:
            return
        is_first = self._plan.stays and all(b.shard.grad is None for b in unit.trained_buffers)
        while not self._plan.fits(unit.name, self._names(self._reducing), is_first=is_first):
            self._finish_oldest()
        started = _Reducing(unit)
        self._reducing.append(started)  # before its first collective: one that fails loses none
        sent = 0
        for index, buffer in enumerate(unit.trained_buffers):
            gradients, nbytes = self._to_send(unit, index, buffer)
            sent += nbytes
            reduction = self._send(buffer, gradients)
            started.reductions.append((reduction, buffer.held_gradients))
            buffer.held_gradients = None
            if reduction.workspace_nbytes:
                nbytes = reduction.workspace_nbytes
                self.ledger.allocate(Buffer.WORKSPACE, unit.name, index, nbytes)
        self.ledger.note(EventKind.REDUCE, unit.name, sent)

    def _to_send(self, unit: ShardedUnit, index: int, buffer: UnitBuffer) -> tuple[Stretches, int]:
        """The gradients, where they are if that serves, and their bytes.

        Messages are alike on every rank, whether it held gradients back or not.
        """
        is_split = not buffer.shard.is_replicated
        in_place = is_split and self._mesh.shard.sends_in_place(buffer.layout.parts)
        is_fresh = is_split and buffer.held_gradients is None
        wire = self._wire(buffer, in_place=in_place) if is_fresh else self.dtype_of(buffer)
        if in_place and is_fresh:
            gradients = [(span, buffer.take(span, ids, wire)) for span, ids in buffer.stretches]
            nbytes = sum(values.nbytes for _, values in gradients)
            self.ledger.allocate(Buffer.WHOLE_GRADS, unit.name, index, nbytes)
            return gradients, nbytes
        flat = self._hold(unit, index, buffer, wire)
        if not in_place:
            return [(Span(0, buffer.layout.numel), flat)], flat.nbytes
        return [(span, flat[span.start : span.stop]) for span, _ in buffer.stretches], flat.nbytes

    def _wire(self, buffer: UnitBuffer, *, in_place: bool) -> torch.dtype:
        """In which gradients of one backward are sent to the owners of their parts."""
        added_in = self.dtype_of(buffer)
        if not self._narrows or not (in_place or self._mesh.shard.exchanges):
            return added_in
        if self._wire_dtype or not in_place:
            return self._wire_dtype or added_in
        return min(buffer.whole.dtype, added_in, key=lambda dtype: dtype.itemsize)

    def _send(self, buffer: UnitBuffer, gradients: Stretches) -> Reduction:
        collectives = self._mesh.shard
        if self._adds_whole(buffer):
            ((_, whole),) = gradients
            return InPlace(collectives.start_all_reduce(whole, at_once=False))
        return collectives.reduce_scatter(gradients, buffer.layout.parts, self.dtype_of(buffer))

    def _adds_whole(self, buffer: UnitBuffer) -> bool:
        return buffer.shard.is_replicated and self._mesh.shard.adds_whole

    @staticmethod
    def _names(started: Iterable[_Reducing] | Iterable[_Combining]) -> list[str]:
        return [each.unit.name for each in started]

    def scales(self, buffer: UnitBuffer) -> tuple[float, float]:
        """What gradients are multiplied with when they are copied, and their sum."""
        scale = 1 / self._mesh.world.size
        return (scale, 1.0) if self._adds_whole(buffer) else (1.0, scale)

    def _finish_oldest(self) -> None:
        started = self._reducing.popleft()
        unit = started.unit
        waiting, started.reductions = started.reductions, []
        with self.ledger.ranges.around("take the sum of", unit.name):
            sums = [self._take_sum(unit, index, waiting.pop(0)) for index in range(len(waiting))]
        whole = (b.shard.is_replicated and not self._adds_whole(b) for b in unit.trained_buffers)
        if not self._mesh.replicas and not any(whole):
            for index, total in enumerate(sums):
                self._add_gradient(unit, index, total)
            self.ledger.note(EventKind.REDUCED, unit.name)
            return
        self.ledger.note(EventKind.REDUCED, unit.name)
        while not self._plan.fits(unit.name, self._names(self._combining)):
            self._finish_combining()
        handles = [
            self._combine(buffer, total)
            for buffer, total in zip(unit.trained_buffers, sums, strict=True)
        ]
        self.ledger.note(EventKind.COMBINE, unit.name, sum(total.nbytes for total in sums))
        self._combining.append(_Combining(unit, handles))

    def _take_sum(
        self, unit: ShardedUnit, index: int, waiting: tuple[Reduction, Tensor | None]
    ) -> Tensor:
        """This rank's part of the mean as a tensor of its own, so that the buffers can go.

        Where this rank keeps the whole gradient, the part lies where it belongs in that, and that
        is the buffer of the reduction if it has the right dtype.
        """
        reduction, whole = waiting
        buffer = unit.trained_buffers[index]
        shard = buffer.shard
        if whole is not None and self._is_gradient(buffer, whole.dtype):
            mean = whole
            self.ledger.free(Buffer.WHOLE_GRADS, unit.name, index)
        else:
            mean = torch.empty_like(shard.param)
        self.ledger.allocate(Buffer.SUM, unit.name, index, mean.nbytes)
        dtype = torch.promote_types(self.dtype_of(buffer), mean.dtype)
        is_part = shard.is_replicated and not self._adds_whole(buffer)
        part = shard.view(mean, shard.owned) if is_part else mean
        _, after = self.scales(buffer)
        reduction.finish(part, after, dtype)
        self.ledger.free(Buffer.WORKSPACE, unit.name, index)
        self.ledger.free(Buffer.WHOLE_GRADS, unit.name, index)
        return mean

    def _is_gradient(self, buffer: UnitBuffer, dtype: torch.dtype) -> bool:
        """Whether a buffer of `dtype` that is reduced becomes this rank's gradient."""
        keeps_all = buffer.shard.is_replicated or self._mesh.shard.size == 1
        return keeps_all and dtype == buffer.shard.dtype

    def _combine(self, buffer: UnitBuffer, total: Tensor) -> Handle:
        if buffer.shard.is_replicated:
            return self._mesh.shard.all_gather(total, buffer.layout.parts, None)
        assert self._mesh.replicas is not None
        return self._mesh.replicas.start_all_reduce(total)

    def _finish_combining(self) -> None:
        started = self._combining.popleft()
        for index, handle in enumerate(started.handles):
            self._add_gradient(started.unit, index, handle.wait())
        self.ledger.note(EventKind.COMBINED, started.unit.name)

    def _add_gradient(self, unit: ShardedUnit, index: int, gradient: Tensor) -> None:
        shard = unit.trained_buffers[index].shard
        self.ledger.free(Buffer.SUM, unit.name, index)
        if shard.grad is None:
            shard.grad = gradient
            self.ledger.allocate(Buffer.GRADS, unit.name, index, gradient.nbytes)
        else:
            shard.grad.add_(gradient)

    def _keeps(self, unit: ShardedUnit, buffer: UnitBuffer) -> bool:
        """Whether the memory of a buffer's gradients stays from step to step.

        Other allocators than the CPU's keep what is given back, for whoever needs it next. Where
        masters have another dtype than parameters, to keep that of the first of the forward too,
        often a large embedding, would take more than DDP does; it is needed when all activations
        are gone.
        """
        pays = buffer.whole.dtype == buffer.shard.dtype or unit.name in self._early
        is_kept = pays and buffer.whole.device.type == "cpu"
        return is_kept and self._is_gradient(buffer, self.dtype_of(buffer))

    def _hold(
        self, unit: ShardedUnit, index: int, buffer: UnitBuffer, dtype: torch.dtype
    ) -> Tensor:
        """The whole gradient in one buffer, with all that has arrived; a new one has `dtype`."""
        before, _ = self.scales(buffer)
        if buffer.held_gradients is None:
            keeps = self._keeps(unit, buffer)
            buffer.held_gradients = buffer.first_gradients(dtype, before, keeps=keeps)
            nbytes = buffer.held_gradients.nbytes
            self.ledger.allocate(Buffer.WHOLE_GRADS, unit.name, index, nbytes)
        else:
            buffer.add_gradients(buffer.held_gradients, before)
        buffer.forget_arrived()
        return buffer.held_gradients
