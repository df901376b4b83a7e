"""Reduction of the gradients of units to this rank's part of their mean.

All ranks start the reductions in the plan's order, a bounded number of bytes at a time. Each ends
with this rank's part of the sum. If that is not enough, a second collective adds it over the
replicas, each of which may keep a share, or gathers the parts.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from fsdpctl.comm.base import Handle
from fsdpctl.comm.collectives import Chain
from fsdpctl.engine.buffer import UnitBuffer
from fsdpctl.engine.collecting import Collector, SentReduction
from fsdpctl.engine.combining import start_combining
from fsdpctl.engine.host_gradients import HostGradients
from fsdpctl.engine.ledger import Ledger
from fsdpctl.engine.unit import ShardedUnit
from fsdpctl.plan.layout import Span
from fsdpctl.plan.reductions import Reductions
from fsdpctl.plan.schedule import Buffer, Event, EventKind

_Sum = tuple[int, Span | None, Tensor]  # number of the buffer, share (None: all), values


@dataclass(slots=True)
class _InFlight:
    """A unit whose gradients are being reduced, or a piece of it."""

    unit: ShardedUnit
    piece: int
    is_last: bool = True  # of the unit's pieces
    sent: list[tuple[int, SentReduction]] = field(default_factory=list)  # by buffer
    sums: list[_Sum] = field(default_factory=list)  # to be combined
    # Of the second collective: number of the buffer, share of this rank's part, handle.
    handles: list[tuple[int, Span | None, Handle]] = field(default_factory=list)

    @property
    def is_alone(self) -> bool:
        """Whether it is all of the unit."""
        return self.is_last and self.piece == 0

    def key(self, number: int) -> tuple[str, int]:
        """Return the ledger's key for a buffer in flight."""
        return self.unit.name, number + self.piece * len(self.unit.trained_buffers)


class GradientReducer:
    """Reduces units in the plan's order, a bounded number of bytes at a time."""

    def __init__(
        self, units: Sequence[ShardedUnit], plan: Reductions, collector: Collector
    ) -> None:
        self.units = {unit.name: unit for unit in units}
        self.collector = collector
        self.ledger = Ledger()
        self.leaving: HostGradients | None = None  # takes gradients to the host
        self._mesh = collector.mesh
        self.plan = plan
        self._chain = self._mesh.chain
        self._combines = collector.transfers.combines
        self._reducing: deque[_InFlight] = deque()
        self._combining: deque[_InFlight] = deque()  # before or in the second collective

    @torch.no_grad()
    def do(self, event: Event) -> None:
        """Do what an event of the schedule says."""
        unit = self.units[event.unit]
        match event.kind:
            case EventKind.HOLD:
                self._hold(unit)
            case EventKind.REDUCE:
                # Kept before its first collective: if one fails, none is lost.
                self._reducing.append(_InFlight(unit, event.index, event.is_last))
                with self.ledger.ranges.around("reduce", unit.name):
                    self._send(self._reducing[-1])
            case EventKind.REDUCED:
                self._finish_reduction(self._reducing.popleft())
            case EventKind.COMBINE if self._chain:
                self._combine_at_once(self._reducing[-1], self._chain)
            case EventKind.COMBINE:
                self._combine_sums(self._combining[-1])
            case EventKind.COMBINED:
                self._finish_combining(self._combining.popleft())

    def _hold(self, unit: ShardedUnit) -> None:
        """Add the gradients that have arrived to those held for a later backward."""
        for number, buffer in enumerate(unit.trained_buffers):
            is_new = buffer.held_gradients is None
            held = self.collector.hold(buffer)
            if is_new:
                self.ledger.allocate(Buffer.WHOLE_GRADS, unit.name, number, held.nbytes)
        self.ledger.note(EventKind.HOLD, unit.name)

    def abandon(self) -> None:
        """Drop all gradients, also those in flight, after a backward that failed."""
        for started in (*self._reducing, *self._combining):
            for number, sent in started.sent:
                (sent.read or sent.reduction).wait()
                self._free_sent(started.key(number))
            for *_, handle in started.handles:
                handle.wait()
            for number, *_ in (*started.sums, *started.handles):
                for buffer in (Buffer.SUM, Buffer.COMBINING):
                    self.ledger.free(buffer, *started.key(number))
        self._reducing.clear()
        self._combining.clear()
        self.drop_gradients()

    def _leave(self, started: _InFlight) -> None:
        """Send the complete gradients of a unit to the host, if they are kept there."""
        if self.leaving is not None and started.is_last:
            self.free_left()
            self.leaving.start(started.unit)

    def free_left(self) -> None:
        """Free the gradients that were sent to the host, once they have been read."""
        unit = None if self.leaving is None else self.leaving.finish()
        if unit is not None:
            for index in range(len(unit.trained_buffers)):
                self.ledger.free(Buffer.GRADS, unit.name, index)

    def drop_gradients(self) -> None:
        """Drop all gradients that are not in flight."""
        self.free_left()
        for unit in self.units.values():
            for index, buffer in enumerate(unit.trained_buffers):
                buffer.drop_gradients()
                self.ledger.free(Buffer.WHOLE_GRADS, unit.name, index)
                self.ledger.free(Buffer.GRADS, unit.name, index)

    def _send(self, started: _InFlight) -> None:
        pieces = 1 if started.is_alone else self.plan.pieces[started.unit.name]
        for number, buffer in enumerate(started.unit.trained_buffers):
            if pieces > 1:
                sent = self.collector.send_piece(buffer, started.piece, pieces)
            else:
                sent = self.collector.send(buffer)
            if sent is None:
                continue
            started.sent.append((number, sent))
            key = started.key(number)
            self.ledger.allocate(Buffer.WHOLE_GRADS, *key, sent.flat.nbytes)
            if sent.reduction.workspace_nbytes:
                self.ledger.allocate(Buffer.WORKSPACE, *key, sent.reduction.workspace_nbytes)
        if started.is_last and pieces > 1:
            for buffer in started.unit.trained_buffers:
                buffer.forget_arrived()
        nbytes = sum(sent.flat.nbytes for _, sent in started.sent)
        self.ledger.note(EventKind.REDUCE, started.unit.name, nbytes)

    def _finish_reduction(self, started: _InFlight) -> None:
        """Add this rank's part of the sums to its gradients, or keep it to be combined."""
        unit, sums = started.unit, started.sums
        with self.ledger.ranges.around("take the sum of", unit.name):
            while started.sent:
                number, sent = started.sent.pop(0)
                if sent.read is None:
                    total = self._take_sum(started, number, sent)
                    sums.append((number, sent.share, total))
                else:  # the second collective has started already
                    sent.read.wait()
                    self._free_sent(started.key(number))
                del sent  # and its memory, before the gradient takes some
        if not self._combines:
            while sums:
                self._add_gradient(started, *sums.pop(0))
            self._leave(started)
        elif not self._chain:
            self._combining.append(started)
        self.ledger.note(EventKind.REDUCED, unit.name)

    def _combine_sums(self, started: _InFlight) -> None:
        """Start the second collective of sums that this rank has taken."""
        sums, started.sums = started.sums, []
        for number, share, total in sums:
            buffer = started.unit.trained_buffers[number]
            handle = start_combining(self._mesh, self.ledger, buffer, started.key(number), total)
            started.handles.append((number, share, handle))
        nbytes = sum(total.nbytes for *_, total in sums)
        self.ledger.note(EventKind.COMBINE, started.unit.name, nbytes)

    def _combine_at_once(self, started: _InFlight, chain: Chain) -> None:
        """Start the sum over replicas behind the reduction; the host waits for neither."""
        nbytes = 0
        for number, sent in started.sent:
            buffer = started.unit.trained_buffers[number]
            mean = self._new_sum(buffer, sent)
            nbytes += mean.nbytes
            self.ledger.allocate(Buffer.SUM, *started.key(number), mean.nbytes)
            key = started.key(number)
            follow = partial(start_combining, self._mesh, self.ledger, buffer, key)
            how = self._scale_and_dtype(buffer, mean)
            sent.read, handle = chain(follow, sent.reduction, mean, *how)
            started.handles.append((number, sent.share, handle))
        self.ledger.note(EventKind.COMBINE, started.unit.name, nbytes)
        self._combining.append(started)

    @staticmethod
    def _new_sum(buffer: UnitBuffer, sent: SentReduction) -> Tensor:
        shard = buffer.shard
        own = shard.param.numel() if sent.share is None else sent.share.numel
        numel = own * buffer.layout.shares
        return torch.empty(numel, dtype=shard.grad_dtype, device=shard.device)

    def _scale_and_dtype(self, buffer: UnitBuffer, mean: Tensor) -> tuple[float, torch.dtype]:
        _, after = self.collector.scales
        return after, torch.promote_types(self.collector.dtype_of(buffer), mean.dtype)

    def _free_sent(self, key: tuple[str, int]) -> None:
        self.ledger.free(Buffer.WORKSPACE, *key)
        self.ledger.free(Buffer.WHOLE_GRADS, *key)

    def _take_sum(self, started: _InFlight, number: int, sent: SentReduction) -> Tensor:
        """Wait, and return this rank's part of the mean in memory of its own.

        If this rank keeps the full gradient, its part is in place within that, in the buffer of the
        reduction if that has the right dtype.
        """
        buffer, key = started.unit.trained_buffers[number], started.key(number)
        shard, collector = buffer.shard, self.collector
        if collector.is_gradient(buffer, sent.flat.dtype):
            mean = sent.flat
            self.ledger.free(Buffer.WHOLE_GRADS, *key)
        else:
            mean = self._new_sum(buffer, sent)
        self.ledger.allocate(Buffer.SUM, *key, mean.nbytes)
        is_part = shard.is_replicated and not collector.transfers.adds_whole
        part = shard.view(mean, shard.owned) if is_part else mean
        sent.reduction.finish(part, *self._scale_and_dtype(buffer, mean))
        self._free_sent(key)
        return mean

    def _finish_combining(self, started: _InFlight) -> None:
        while started.handles:  # whose memory goes with them
            number, share, handle = started.handles.pop(0)
            total = handle.wait()
            del handle
            self._add_gradient(started, number, share, total)
        self._leave(started)
        self.ledger.note(EventKind.COMBINED, started.unit.name)

    def _add_gradient(
        self, started: _InFlight, number: int, share: Span | None, gradient: Tensor
    ) -> None:
        shard, key = started.unit.trained_buffers[number].shard, started.key(number)
        if shard.grad is None:
            if share is not None:
                shard.grad = torch.zeros_like(
                    shard.param, dtype=shard.grad_dtype, device=shard.device
                )
            elif shard.layout.shares > 1:
                gradient = gradient.clone()  # so that the rest of its memory can be freed
                shard.grad = gradient
            else:
                shard.grad = gradient
                self.ledger.free(Buffer.SUM, *key)
            nbytes = shard.param.numel() * shard.grad_dtype.itemsize
            self.ledger.allocate(Buffer.GRADS, started.unit.name, number, nbytes)
        if shard.grad is not gradient:
            part = shard.grad if share is None else shard.grad[share.start : share.stop]
            part.add_(gradient)
        self.ledger.free(Buffer.SUM, *key)
