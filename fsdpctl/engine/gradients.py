"""The reduction of gradients to this rank's shard of their mean.

When the backward of a unit is complete, one fused copy moves (and casts) its gradients into a flat
buffer, which exists until the reduction is done. Copying each gradient as it arrives would need the
buffer at the start of the unit's backward, while the buffer of the previous reduction is still in
use. Units larger than every block are reduced in pieces. Missing gradients count as zero.

A reduction ends with this rank's shard of the sum. If ranks are replicated, a second collective
adds the shard over the replicas, each of which may keep a share. If each rank needs the full sum,
the second collective gathers the shards.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from fsdpctl.comm.collectives import AllGatherInput, Handle, InPlaceReduction, Reduction
from fsdpctl.comm.mesh import Mesh
from fsdpctl.engine.buffer_accounting import BufferAccounting
from fsdpctl.engine.flat_buffer import FlatBuffer
from fsdpctl.engine.offload import GradientOffload
from fsdpctl.engine.unit import ShardedUnit
from fsdpctl.plan.layout import EvenSpans, Span
from fsdpctl.plan.schedule import BufferKind, Event, EventKind
from fsdpctl.plan.step_plan import StepPlan, piece_span


@dataclass(slots=True)
class FlatReduction:
    """The reduction of a flat buffer, or of one piece of it."""

    buffer: FlatBuffer
    index: int  # index of the buffer in its unit
    key: tuple[str, int]  # unit and index in the accounting
    piece: Span | None  # elements of this rank's owned span; None: all
    full: Tensor | None  # the input, kept until the collective has read it
    collective: Reduction | None
    chained: Handle | None = None  # only of `NcclCollectives.chain`: done once `full` may be freed
    partial_sum: Tensor | None = None  # this rank's shard, to be combined or added to gradients
    combine_handle: Handle | None = None  # the second collective


@dataclass(slots=True)
class UnitReduction:
    """The reductions of a unit, or of one piece of it."""

    unit: ShardedUnit
    is_last: bool  # whether the unit has no further piece
    reductions: list[FlatReduction] = field(default_factory=list)


class GradientReducer:
    """An executor of the events of the schedule that concern gradients."""

    def __init__(self, units: Sequence[ShardedUnit], mesh: Mesh, plan: StepPlan) -> None:
        self.units = {unit.name: unit for unit in units}
        self.accounting = BufferAccounting()
        self.offload: GradientOffload | None = None  # takes gradients to the host
        self._plan = plan
        self._mesh, self._chaining = mesh, mesh.chaining
        scale = 1 / mesh.world.size
        self._copy_scale, self._sum_scale = (scale, 1.0) if plan.uses_all_reduce else (1.0, scale)
        self._reducing: deque[UnitReduction] = deque()
        self._combining: deque[UnitReduction] = deque()  # before or in the second collective

    @torch.no_grad()
    def execute(self, event: Event) -> None:
        unit, combines_at_once = self.units[event.unit], self._chaining is not None
        match event.kind:
            case EventKind.HOLD:
                for index, buffer in enumerate(unit.trained_buffers):
                    is_new = buffer.held_gradients is None
                    grads = self._accumulate(buffer)
                    if is_new:
                        kind = BufferKind.UNSHARDED_GRADS
                        self.accounting.allocate(kind, unit.name, index, grads.nbytes)
                self.accounting.record(EventKind.HOLD, unit.name)
            case EventKind.REDUCE:
                # The reduction is queued before its first collective starts: if a later collective
                # fails, `abandon` must wait for those in flight, which still use their memory.
                self._reducing.append(UnitReduction(unit, event.is_last))
                with self.accounting.ranges.annotate("reduce", unit.name):
                    self._start_reductions(self._reducing[-1], event.index)
            case EventKind.REDUCED:
                self._finish_reduction(self._reducing.popleft())
            case EventKind.COMBINE:
                queue = self._reducing if combines_at_once else self._combining
                self._combine(queue[-1])
                if combines_at_once:  # the reduction is then in both queues until REDUCED
                    self._combining.append(queue[-1])
            case EventKind.COMBINED:
                self._add_gradients(self._combining[0])
                self.accounting.record(EventKind.COMBINED, self._combining.popleft().unit.name)

    def abandon(self) -> None:
        """Drop all gradients after a failed backward; wait for reductions in flight first."""
        kinds = (BufferKind.WORKSPACE, BufferKind.UNSHARDED_GRADS, BufferKind.SUM)
        in_flight = (*self._reducing, *self._combining)
        for reduction in (each for unit in in_flight for each in unit.reductions):
            for handle in (reduction.chained or reduction.collective, reduction.combine_handle):
                if handle is not None:
                    handle.wait()
            for kind in (*kinds, BufferKind.REPLICA_WORKSPACE):
                self.accounting.deallocate(kind, *reduction.key)
        self._reducing.clear()
        self._combining.clear()
        self.drop_gradients()

    def free_offloaded(self) -> None:
        """Free the gradients that were copied to the host, once the copies have read them."""
        unit = None if self.offload is None else self.offload.finish()
        if unit is not None:
            for index in range(len(unit.trained_buffers)):
                self.accounting.deallocate(BufferKind.GRADS, unit.name, index)

    def drop_gradients(self) -> None:
        self.free_offloaded()
        for unit in self.units.values():
            for index, buffer in enumerate(unit.trained_buffers):
                buffer.drop_gradients()
                self.accounting.deallocate(BufferKind.UNSHARDED_GRADS, unit.name, index)
                self.accounting.deallocate(BufferKind.GRADS, unit.name, index)

    def _accumulate(self, buffer: FlatBuffer) -> Tensor:
        """Accumulate the parameters' gradients in the held flat buffer, and return it."""
        if buffer.held_gradients is None:
            buffer.held_gradients = buffer.flatten_gradients(self._copy_scale)
        else:
            buffer.add_gradients(buffer.held_gradients, self._copy_scale)
        buffer.clear_param_grads()
        return buffer.held_gradients

    def _start_reductions(self, pending: UnitReduction, piece_index: int) -> None:
        unit, shard = pending.unit, self._mesh.shard
        # If the first piece is the last one, the unit is not cut: held gradients are in one buffer.
        is_whole = pending.is_last and not piece_index
        num_pieces = 1 if is_whole else self._plan.reductions.pieces[unit.name]
        for index, buffer in enumerate(unit.trained_buffers):
            span, spans = None, buffer.layout.shard_spans
            if num_pieces == 1:
                full, buffer.held_gradients = self._accumulate(buffer), None
            else:
                span = piece_span(buffer.layout, piece_index, num_pieces)
                if not span.numel:
                    continue
                full = buffer.collect_piece(span)
                spans = EvenSpans(full.numel() // shard.size, shard.size)
            if self._plan.uses_all_reduce:
                collective: Reduction = InPlaceReduction(shard.start_all_reduce(full))
            else:
                collective = shard.reduce_scatter(full, spans)
            key = unit.name, index + piece_index * len(unit.trained_buffers)
            pending.reductions.append(FlatReduction(buffer, index, key, span, full, collective))
            self.accounting.allocate(BufferKind.UNSHARDED_GRADS, *key, full.nbytes)
            if collective.workspace_nbytes:
                self.accounting.allocate(BufferKind.WORKSPACE, *key, collective.workspace_nbytes)
        if pending.is_last and num_pieces > 1:
            for buffer in unit.trained_buffers:
                buffer.clear_param_grads()
        nbytes = sum(each.full.nbytes for each in pending.reductions if each.full is not None)
        self.accounting.record(EventKind.REDUCE, unit.name, nbytes)

    def _finish_reduction(self, pending: UnitReduction) -> None:
        """Wait for a unit's reductions; then add the sums to the gradients, or queue them."""
        with self.accounting.ranges.annotate("take the sum of", pending.unit.name):
            for reduction in pending.reductions:
                if reduction.chained is None:
                    self._take_sum(reduction)
                else:  # the second collective has started already
                    reduction.chained.wait()
                reduction.full = reduction.collective = reduction.chained = None
                self.accounting.deallocate(BufferKind.WORKSPACE, *reduction.key)
                self.accounting.deallocate(BufferKind.UNSHARDED_GRADS, *reduction.key)
        if not self._plan.combines:
            self._add_gradients(pending)
        elif self._chaining is None:
            self._combining.append(pending)
        self.accounting.record(EventKind.REDUCED, pending.unit.name)

    def _take_sum(self, reduction: FlatReduction) -> None:
        """Wait for the reduction, and write this rank's shard of the sum to new memory.

        A rank that stores full gradients writes to the shard's position in a flat buffer, which is
        the reduction's own if the dtypes are equal.
        """
        shard, full = reduction.buffer.shard, reduction.full
        assert full is not None
        assert reduction.collective is not None
        if self._plan.reduces_in_place(shard.layout):
            partial_sum = full
            self.accounting.deallocate(BufferKind.UNSHARDED_GRADS, *reduction.key)
        else:
            partial_sum = self._new_sum(reduction)
        reduction.partial_sum = partial_sum
        self.accounting.allocate(BufferKind.SUM, *reduction.key, partial_sum.nbytes)
        is_part = shard.stores_all and not self._plan.uses_all_reduce
        shard_sum = shard.view(partial_sum, shard.owned_span) if is_part else partial_sum
        reduction.collective.finish(shard_sum, *self._sum_options(reduction))

    @staticmethod
    def _new_sum(reduction: FlatReduction) -> Tensor:
        shard = reduction.buffer.shard
        size = shard.param.numel() if reduction.piece is None else reduction.piece.numel
        numel = size * reduction.buffer.layout.shares_per_shard
        return torch.empty(numel, dtype=shard.grad_dtype, device=shard.device)

    def _sum_options(self, reduction: FlatReduction) -> tuple[float, torch.dtype]:
        grad_dtype = reduction.buffer.shard.grad_dtype
        return self._sum_scale, torch.promote_types(reduction.buffer.reduce_dtype, grad_dtype)

    def _combine(self, pending: UnitReduction) -> None:
        """Start the second collective; over NCCL, enqueue it right behind the reduction."""
        nbytes = 0
        for reduction in pending.reductions:
            if self._chaining is None:
                partial_sum, reduction.partial_sum = reduction.partial_sum, None
                assert partial_sum is not None
                reduction.combine_handle = self._start_combining(reduction, partial_sum)
            else:
                partial_sum = self._new_sum(reduction)
                self.accounting.allocate(BufferKind.SUM, *reduction.key, partial_sum.nbytes)
                assert reduction.collective is not None
                follow = partial(self._start_combining, reduction)
                options = self._sum_options(reduction)
                handles = self._chaining.chain(follow, reduction.collective, partial_sum, *options)
                reduction.chained, reduction.combine_handle = handles
            nbytes += partial_sum.nbytes
        self.accounting.record(EventKind.COMBINE, pending.unit.name, nbytes)

    def _start_combining(self, reduction: FlatReduction, partial_sum: Tensor) -> Handle:
        """Start the second collective; its handle returns `partial_sum` or this replica's share."""
        layout, replicas = reduction.buffer.layout, self._mesh.replicas
        if reduction.buffer.shard.stores_all:
            return self._mesh.shard.all_gather([AllGatherInput(partial_sum, layout.shard_spans)])
        assert replicas is not None
        if layout.shares_per_shard == 1:
            return replicas.start_all_reduce(partial_sum)
        numel = partial_sum.numel() // replicas.size
        collective = replicas.reduce_scatter(partial_sum, EvenSpans(numel, replicas.size))
        if collective.workspace_nbytes:
            kind, nbytes = BufferKind.REPLICA_WORKSPACE, collective.workspace_nbytes
            self.accounting.allocate(kind, *reduction.key, nbytes)
        share = partial_sum.narrow(0, replicas.rank * numel, numel)

        def finish() -> Tensor:
            collective.finish(share, scale=1.0, dtype=share.dtype)
            self.accounting.deallocate(BufferKind.REPLICA_WORKSPACE, *reduction.key)
            return share

        return Handle(finish)

    def _add_gradients(self, pending: UnitReduction) -> None:
        """Add complete sums to this rank's gradients, and start to offload these if planned."""
        for reduction in pending.reductions:
            if reduction.combine_handle is not None:
                reduction.partial_sum = reduction.combine_handle.wait()
                reduction.combine_handle = None
            self._add_gradient(reduction)
        if self.offload is not None and pending.is_last:
            self.free_offloaded()
            self.offload.start(pending.unit)

    def _add_gradient(self, reduction: FlatReduction) -> None:
        shard, span, gradient = reduction.buffer.shard, reduction.piece, reduction.partial_sum
        assert gradient is not None
        reduction.partial_sum = None
        if shard.grad is None:
            if span is not None:
                dtype, device = shard.grad_dtype, shard.device
                shard.grad = torch.zeros_like(shard.param, dtype=dtype, device=device)
            elif shard.layout.shares_per_shard > 1:
                gradient = gradient.clone()  # a view would keep the other replicas' shares alive
                shard.grad = gradient
            else:
                shard.grad = gradient  # the memory of the sum is not counted twice
                self.accounting.deallocate(BufferKind.SUM, *reduction.key)
            nbytes = shard.param.numel() * shard.grad_dtype.itemsize
            self.accounting.allocate(BufferKind.GRADS, reduction.key[0], reduction.index, nbytes)
        if shard.grad is not gradient:
            target = shard.grad if span is None else shard.grad[span.start : span.stop]
            target.add_(gradient)
        self.accounting.deallocate(BufferKind.SUM, *reduction.key)
