"""From the gradients of a unit's parameters to what its ranks send each other.

Where ranks send each other gradients as they are, nothing is copied. Elsewhere one fused copy moves
(and casts) a unit's gradients into a buffer, when its backward is over, that exists only until the
reduction is done. Copying each as it arrives would take that buffer while the unit's backward has
just begun, and with it the memory in which the previous reduction overlaps. Units larger than every
block are copied and sent a piece at a time.

What did not arrive counts as zero.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdpctl.comm.base import Handle, InPlace, Reduction, Stretches
from fsdpctl.comm.mesh import Mesh
from fsdpctl.engine.buffer import UnitBuffer
from fsdpctl.plan.layout import EvenParts, Span
from fsdpctl.plan.reductions import share_of_parts


@dataclass(slots=True)
class Sent:
    """What is on its way of one flat buffer."""

    reduction: Reduction
    nbytes: int  # sent
    held: Tensor | None = None  # the one tensor that it works on, where gradients were held in one
    share: Span | None = None  # the elements of what this rank owns that it gives; None: all
    read: Handle | None = None  # where a second collective followed at once: the first was read


@dataclass(frozen=True, slots=True)
class Collector:
    """Brings gradients together, and sends them.

    `dtypes`: in which gradients are added, by the masters' dtype. `early`: the units whose
    reduction others' backward follows. `wire_dtype`: of gradients of one backward; None: what loses
    nothing and serves the backend. `narrows`: it may be another than they are added in. Only where
    all ranks go through the same backwards, because what was held has that.
    """

    mesh: Mesh
    dtypes: dict[torch.dtype, torch.dtype]
    early: Collection[str]
    wire_dtype: torch.dtype | None
    narrows: bool

    def dtype_of(self, buffer: UnitBuffer) -> torch.dtype:
        """In which its gradients are collected and added."""
        return self.dtypes[buffer.shard.dtype]

    def adds_whole(self, buffer: UnitBuffer) -> bool:
        """Whether all ranks get all of the sum at once."""
        return buffer.shard.is_replicated and self.mesh.shard.adds_whole

    def scales(self, buffer: UnitBuffer) -> tuple[float, float]:
        """What gradients are multiplied with when they are copied, and their sum."""
        scale = 1 / self.mesh.world.size
        return (scale, 1.0) if self.adds_whole(buffer) else (1.0, scale)

    def send(self, unit: str, buffer: UnitBuffer) -> Sent:
        """All of a buffer's gradients.

        Messages are alike on every rank, whether it held gradients back or not.
        """
        is_split = not buffer.shard.is_replicated
        in_place = is_split and self.mesh.shard.sends_in_place(buffer.layout.parts)
        is_fresh = is_split and buffer.held_gradients is None
        wire = self._wire(buffer, in_place=in_place) if is_fresh else self.dtype_of(buffer)
        if in_place and is_fresh:
            stretches = [(span, buffer.take(span, ids, wire)) for span, ids in buffer.stretches]
            return self._start(buffer, stretches)
        flat = self.hold(unit, buffer, wire)
        buffer.held_gradients = None
        if in_place:
            return self._start(
                buffer, [(span, flat[span.start : span.stop]) for span, _ in buffer.stretches], flat
            )
        return self._start(buffer, [(Span(0, buffer.layout.numel), flat)], flat)

    def _start(self, buffer: UnitBuffer, gradients: Stretches, held: Tensor | None = None) -> Sent:
        nbytes = sum(values.nbytes for _, values in gradients) if held is None else held.nbytes
        collectives = self.mesh.shard
        if self.adds_whole(buffer):
            ((_, whole),) = gradients
            added = InPlace(collectives.start_all_reduce(whole, at_once=False))
            return Sent(added, nbytes, held)
        dtype = self.dtype_of(buffer)
        return Sent(collectives.reduce_scatter(gradients, buffer.layout.parts, dtype), nbytes, held)

    def send_piece(self, buffer: UnitBuffer, piece: int, pieces: int) -> Sent | None:
        """Of what every rank owns one of `pieces` shares; None where there is nothing in it.

        The gradients stay with their parameters.
        """
        share = share_of_parts(buffer.layout, piece, pieces)
        if not share.numel:
            return None
        flat = buffer.collect(share, self._wire(buffer, in_place=False))
        size = self.mesh.shard.size
        whole, parts = Span(0, flat.numel()), EvenParts(flat.numel() // size, size)
        reduction = self.mesh.shard.reduce_scatter([(whole, flat)], parts, self.dtype_of(buffer))
        return Sent(reduction, flat.nbytes, share=share)

    def _wire(self, buffer: UnitBuffer, *, in_place: bool) -> torch.dtype:
        """In which gradients of one backward are sent to the owners of their parts."""
        added_in = self.dtype_of(buffer)
        if not self.narrows or not (in_place or self.mesh.shard.exchanges):
            return added_in
        if self.wire_dtype or not in_place:
            return self.wire_dtype or added_in
        return min(buffer.whole.dtype, added_in, key=lambda dtype: dtype.itemsize)

    def hold(self, unit: str, buffer: UnitBuffer, dtype: torch.dtype) -> Tensor:
        """The whole gradient in one buffer, with all that has arrived; a new one has `dtype`."""
        before, _ = self.scales(buffer)
        if buffer.held_gradients is None:
            keeps = self._keeps(unit, buffer)
            buffer.held_gradients = buffer.first_gradients(dtype, before, keeps=keeps)
        else:
            buffer.add_gradients(buffer.held_gradients, before)
        buffer.forget_arrived()
        return buffer.held_gradients

    def is_gradient(self, buffer: UnitBuffer, dtype: torch.dtype) -> bool:
        """Whether a buffer of `dtype` that is reduced becomes this rank's gradient."""
        keeps_all = buffer.shard.is_replicated or self.mesh.shard.size == 1
        return keeps_all and dtype == buffer.shard.dtype

    def _keeps(self, unit: str, buffer: UnitBuffer) -> bool:
        """Whether the memory of a buffer's gradients stays from step to step.

        Other allocators than the CPU's keep what is given back, for whoever needs it next. Where
        masters have another dtype than parameters, to keep that of the first of the forward too,
        often a large embedding, would take more than DDP does; it is needed when all activations
        are gone.
        """
        pays = buffer.whole.dtype == buffer.shard.dtype or unit in self.early
        is_kept = pays and buffer.whole.device.type == "cpu"
        return is_kept and self.is_gradient(buffer, self.dtype_of(buffer))
