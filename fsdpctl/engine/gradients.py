"""Reduces gradients: from the parameters to this rank's shard of their mean.

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
    reduction: Reduction | None
    chained: Handle | None = None  # over NCCL with replicas: ends once `full` has been read
    mean: Tensor | None = None  # this rank's shard of the mean, to be combined or added
    combined: Handle | None = None  # the second collective


@dataclass(slots=True)
class _InFlight:
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
        self._scales = (scale, 1.0) if plan.uses_all_reduce else (1.0, scale)  # copies, sums
        self._reducing: deque[_InFlight] = deque()
        self._combining: deque[_InFlight] = deque()  # before or in the second collective

    @torch.no_grad()
    def execute(self, event: Event) -> None:
        unit, combines_at_once = self.units[event.unit], self._chaining is not None
        match event.kind:
            case EventKind.HOLD:
                for number, buffer in enumerate(unit.trained_buffers):
                    is_new = buffer.held_gradients is None
                    grads = self._accumulate(buffer)
                    if is_new:
                        kind = BufferKind.UNSHARDED_GRADS
                        self.accounting.allocate(kind, unit.name, number, grads.nbytes)
                self.accounting.record(EventKind.HOLD, unit.name)
            case EventKind.REDUCE:
                # Recorded before its first collective starts. If a later one fails, `abandon` must
                # wait for the collectives in flight, which still use their memory.
                self._reducing.append(_InFlight(unit, event.is_last))
                with self.accounting.ranges.annotate("reduce", unit.name):
                    self._start_reductions(self._reducing[-1], event.index)
            case EventKind.REDUCED:
                self._finish_reduction(self._reducing.popleft())
            case EventKind.COMBINE:
                queue = self._reducing if combines_at_once else self._combining
                self._combine(queue[-1])
                if combines_at_once:
                    self._combining.append(queue[-1])
            case EventKind.COMBINED:
                self._add_gradients(self._combining[0])
                self.accounting.record(EventKind.COMBINED, self._combining.popleft().unit.name)

    def abandon(self) -> None:
        """Drop all gradients after a failed backward; wait for reductions in flight first."""
        for flat in (e for each in (*self._reducing, *self._combining) for e in each.reductions):
            for handle in (flat.chained or flat.reduction, flat.combined):
                if handle is not None:
                    handle.wait()
            for buffer in (
                BufferKind.WORKSPACE,
                BufferKind.UNSHARDED_GRADS,
                BufferKind.SUM,
                BufferKind.REPLICA_WORKSPACE,
            ):
                self.accounting.deallocate(buffer, *flat.key)
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
        scale, _ = self._scales
        if buffer.held_gradients is None:
            buffer.held_gradients = buffer.flatten_gradients(scale)
        else:
            buffer.add_gradients(buffer.held_gradients, scale)
        buffer.clear_param_grads()
        return buffer.held_gradients

    def _start_reductions(self, started: _InFlight, piece: int) -> None:
        unit, shard = started.unit, self._mesh.shard
        pieces = 1 if started.is_last and not piece else self._plan.reductions.pieces[unit.name]
        for index, buffer in enumerate(unit.trained_buffers):
            span, spans = None, buffer.layout.shard_spans
            if pieces == 1:
                full, buffer.held_gradients = self._accumulate(buffer), None
            else:
                span = piece_span(buffer.layout, piece, pieces)
                if not span.numel:
                    continue
                full = buffer.collect_piece(span)
                spans = EvenSpans(full.numel() // shard.size, shard.size)
            if self._plan.uses_all_reduce:
                reduction: Reduction = InPlaceReduction(shard.start_all_reduce(full))
            else:
                reduction = shard.reduce_scatter(full, spans)
            key = unit.name, index + piece * len(unit.trained_buffers)
            started.reductions.append(FlatReduction(buffer, index, key, span, full, reduction))
            self.accounting.allocate(BufferKind.UNSHARDED_GRADS, *key, full.nbytes)
            if reduction.workspace_nbytes:
                self.accounting.allocate(BufferKind.WORKSPACE, *key, reduction.workspace_nbytes)
        if started.is_last and pieces > 1:
            for buffer in unit.trained_buffers:
                buffer.clear_param_grads()
        nbytes = sum(each.full.nbytes for each in started.reductions if each.full is not None)
        self.accounting.record(EventKind.REDUCE, unit.name, nbytes)

    def _finish_reduction(self, started: _InFlight) -> None:
        """Take this rank's shard of the sums: add it to the gradients, or combine it next."""
        with self.accounting.ranges.annotate("take the sum of", started.unit.name):
            for flat in started.reductions:
                if flat.chained is None:
                    self._take_sum(flat)
                else:  # the second collective has started already
                    flat.chained.wait()
                flat.full = flat.reduction = flat.chained = None
                self.accounting.deallocate(BufferKind.WORKSPACE, *flat.key)
                self.accounting.deallocate(BufferKind.UNSHARDED_GRADS, *flat.key)
        if not self._plan.combines:
            self._add_gradients(started)
        elif self._chaining is None:
            self._combining.append(started)
        self.accounting.record(EventKind.REDUCED, started.unit.name)

    def _take_sum(self, flat: FlatReduction) -> None:
        """Write this rank's shard of the mean to new memory, once the reduction is done.

        If this rank stores the full gradient, the shard is written to its position in a full
        buffer: the buffer of the reduction, if that has the dtype of gradients.
        """
        shard, full = flat.buffer.shard, flat.full
        assert full is not None
        assert flat.reduction is not None
        if self._plan.reduces_in_place(shard.layout):
            flat.mean = full
            self.accounting.deallocate(BufferKind.UNSHARDED_GRADS, *flat.key)
        else:
            flat.mean = self._new_mean(flat)
        self.accounting.allocate(BufferKind.SUM, *flat.key, flat.mean.nbytes)
        is_part = shard.stores_all and not self._plan.uses_all_reduce
        shard_mean = shard.view(flat.mean, shard.owned_span) if is_part else flat.mean
        flat.reduction.finish(shard_mean, *self._sum_options(flat))

    @staticmethod
    def _new_mean(flat: FlatReduction) -> Tensor:
        shard = flat.buffer.shard
        size = shard.param.numel() if flat.piece is None else flat.piece.numel
        numel = size * flat.buffer.layout.shares_per_shard
        return torch.empty(numel, dtype=shard.grad_dtype, device=shard.device)

    def _sum_options(self, flat: FlatReduction) -> tuple[float, torch.dtype]:
        grad_dtype = flat.buffer.shard.grad_dtype
        return self._scales[1], torch.promote_types(flat.buffer.reduce_dtype, grad_dtype)

    def _combine(self, started: _InFlight) -> None:
        """Start the second collective; over NCCL, enqueue it right behind the reduction."""
        nbytes = 0
        for flat in started.reductions:
            if self._chaining is None:
                mean, flat.mean = flat.mean, None
                assert mean is not None
                flat.combined = self._start_combining(flat, mean)
            else:
                mean = self._new_mean(flat)
                self.accounting.allocate(BufferKind.SUM, *flat.key, mean.nbytes)
                assert flat.reduction is not None

                def follow(total: Tensor, flat: FlatReduction = flat) -> Handle:
                    return self._start_combining(flat, total)

                chain, options = self._chaining.chain, self._sum_options(flat)
                flat.chained, flat.combined = chain(follow, flat.reduction, mean, *options)
            nbytes += mean.nbytes
        self.accounting.record(EventKind.COMBINE, started.unit.name, nbytes)

    def _start_combining(self, flat: FlatReduction, total: Tensor) -> Handle:
        """Start the second collective on `total`. Its result is `total`, or the replica's share."""
        layout, replicas = flat.buffer.layout, self._mesh.replicas
        if flat.buffer.shard.stores_all:
            return self._mesh.shard.all_gather([AllGatherInput(total, layout.shard_spans)])
        assert replicas is not None
        if layout.shares_per_shard == 1:
            return replicas.start_all_reduce(total)
        numel = total.numel() // replicas.size
        reduction = replicas.reduce_scatter(total, EvenSpans(numel, replicas.size))
        if reduction.workspace_nbytes:
            kind, nbytes = BufferKind.REPLICA_WORKSPACE, reduction.workspace_nbytes
            self.accounting.allocate(kind, *flat.key, nbytes)
        share = total.narrow(0, replicas.rank * numel, numel)

        def finish() -> Tensor:
            reduction.finish(share, 1.0, share.dtype)
            self.accounting.deallocate(BufferKind.REPLICA_WORKSPACE, *flat.key)
            return share

        return Handle(finish)

    def _add_gradients(self, started: _InFlight) -> None:
        """Add complete means to this rank's gradients, and start to offload these if planned."""
        for flat in started.reductions:
            if flat.combined is not None:
                flat.mean, flat.combined = flat.combined.wait(), None
            self._add_gradient(flat)
        if self.offload is not None and started.is_last:
            self.free_offloaded()
            self.offload.start(started.unit)

    def _add_gradient(self, flat: FlatReduction) -> None:
        shard, span, gradient = flat.buffer.shard, flat.piece, flat.mean
        assert gradient is not None
        flat.mean = None
        if shard.grad is None:
            if span is not None:
                dtype, device = shard.grad_dtype, shard.device
                shard.grad = torch.zeros_like(shard.param, dtype=dtype, device=device)
            elif shard.layout.shares_per_shard > 1:
                gradient = gradient.clone()  # a view would keep the other replicas' shares alive
                shard.grad = gradient
            else:
                shard.grad = gradient
                self.accounting.deallocate(BufferKind.SUM, *flat.key)
            nbytes = shard.param.numel() * shard.grad_dtype.itemsize
            self.accounting.allocate(BufferKind.GRADS, flat.key[0], flat.index, nbytes)
        if shard.grad is not gradient:
            target = shard.grad if span is None else shard.grad[span.start : span.stop]
            target.add_(gradient)
        self.accounting.deallocate(BufferKind.SUM, *flat.key)
