"""Collecting the gradients of a unit's parameters, and starting their reduction.

One fused copy moves (and casts) a unit's gradients into a buffer when its backward is over; the
buffer exists only until the reduction is done. Copying each gradient as it arrives would need that
buffer when the unit's backward has just begun, and with it the memory in which the previous
reduction overlaps. Units larger than every block are copied and sent in pieces.

Missing gradients count as zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fsdpctl.comm.base import Handle, InPlace, Reduction
from fsdpctl.comm.collectives import Mesh
from fsdpctl.engine.buffer import UnitBuffer
from fsdpctl.plan.layout import EvenParts, Span
from fsdpctl.plan.reductions import share_of_parts
from fsdpctl.plan.transfers import Transfers


@dataclass(slots=True)
class SentReduction:
    """A reduction in flight of one flat buffer."""

    reduction: Reduction
    flat: Tensor  # that is sent
    share: Span | None = None  # the elements of this rank's part that it covers; None: all
    read: Handle | None = None  # if a second collective follows at once: the first one was read


@dataclass(frozen=True, slots=True)
class Collector:
    """Collects gradients, and starts their reduction."""

    mesh: Mesh
    transfers: Transfers
    dtypes: dict[torch.dtype, torch.dtype]  # in which gradients are added, by the masters' dtype

    def dtype_of(self, buffer: UnitBuffer) -> torch.dtype:
        """Return the dtype in which a buffer's gradients are collected and added."""
        return self.dtypes[buffer.shard.dtype]

    @property
    def scales(self) -> tuple[float, float]:
        """The factors for gradients as they are copied, and for their sum."""
        scale = 1 / self.mesh.world.size
        return (scale, 1.0) if self.transfers.adds_whole else (1.0, scale)

    def send(self, buffer: UnitBuffer) -> SentReduction:
        """Start the reduction of all of a buffer's gradients, also those that were held."""
        flat, buffer.held_gradients = self.hold(buffer), None
        if self.transfers.adds_whole:
            added: Reduction = InPlace(self.mesh.shard.start_all_reduce(flat))
        else:
            added = self.mesh.shard.reduce_scatter(flat, buffer.layout.parts)
        return SentReduction(added, flat)

    def send_piece(self, buffer: UnitBuffer, piece: int, pieces: int) -> SentReduction | None:
        """Start the reduction of one of `pieces` shares of every rank's part; None if it is empty.

        The parameters keep their gradients.
        """
        share = share_of_parts(buffer.layout, piece, pieces)
        if not share.numel:
            return None
        flat, size = buffer.collect(share, self.dtype_of(buffer)), self.mesh.shard.size
        parts = EvenParts(flat.numel() // size, size)
        return SentReduction(self.mesh.shard.reduce_scatter(flat, parts), flat, share)

    def hold(self, buffer: UnitBuffer) -> Tensor:
        """Return the full gradient so far in one buffer, in the dtype of the additions."""
        before, _ = self.scales
        if buffer.held_gradients is None:
            buffer.held_gradients = buffer.first_gradients(self.dtype_of(buffer), before)
        else:
            buffer.add_gradients(buffer.held_gradients, before)
        buffer.forget_arrived()
        return buffer.held_gradients

    def is_gradient(self, buffer: UnitBuffer, dtype: torch.dtype) -> bool:
        """Return whether a reduced buffer of `dtype` becomes this rank's gradient."""
        return self.transfers.becomes_gradient(same_dtype=dtype == buffer.shard.grad_dtype)
