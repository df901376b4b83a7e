"""How the ranks of a strategy reduce gradients: decided here for the engine and its predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdpctl.plan.layout import FlatLayout
from fsdpctl.plan.reductions import Itemsize, Reductions, Transport, num_pieces
from fsdpctl.plan.strategy import Strategy
from fsdpctl.plan.units import UnitOrder


@dataclass(frozen=True, slots=True)
class Transfers:
    """The transfers of gradients; equal on all ranks."""

    strategy: Strategy  # the effective one
    transport: Transport
    size: int  # the ranks that share a replica
    num_replicas: int

    @property
    def adds_whole(self) -> bool:
        """Whether one all-reduce gives every rank the full sum.

        Over gloo, the parts are added in rank order, as everywhere else, and then gathered.
        """
        keeps = self.size > 1 and not self.strategy.shards_grads
        return keeps and self.transport is Transport.NCCL

    @property
    def combines(self) -> bool:
        """Whether a second collective follows each reduction."""
        puts_together = not self.strategy.shards_grads and not self.adds_whole
        return self.num_replicas > 1 or (self.size > 1 and puts_together)

    @property
    def chained(self) -> int:
        """`Reductions.chained`: over NCCL, replicas are summed on streams of their own."""
        follows = self.strategy.replicates and self.num_replicas > 1
        return self.size if follows and self.transport is Transport.NCCL else 0

    def becomes_gradient(self, *, same_dtype: bool) -> bool:
        """Return whether the buffer of a reduction becomes the gradient, if it has its dtype."""
        return same_dtype and (self.size == 1 or not self.strategy.shards_grads)

    def reductions(
        self,
        layouts: Mapping[str, Sequence[FlatLayout]],
        order: UnitOrder,
        itemsize: Itemsize,
        *,
        same_dtype: bool,
    ) -> Reductions:
        """Allow as many bytes in flight as the largest unit has, or twice that for 2-byte elements.

        Two reductions of 2 bytes per element cost as much as one of 4. The order of collectives
        follows from this, so it depends on nothing that differs between ranks. If parameters are
        sharded, the largest block sets the budget, and larger units, usually embedding and head,
        are reduced in pieces of its size. `same_dtype`: gradients have the dtype of the sum.
        """
        trained = {
            name: [layout for layout in of_unit if layout.trainable]
            for name, of_unit in layouts.items()
        }
        nbytes = {
            name: sum(layout.numel * itemsize(layout) for layout in of_unit)
            for name, of_unit in trained.items()
        }
        widest = max((itemsize(each) for of in trained.values() for each in of), default=4)
        blocks = order.blocks if self.strategy.shards_params and self.size > 1 else ()
        largest = max((nbytes[name] for name in blocks), default=0) or max(nbytes.values())
        pieces = {
            name: num_pieces(trained[name], -(-size // largest))
            for name, size in nbytes.items()
            if size > largest
        }
        budget, stays = largest * (1 if widest > 2 else 2), self.adds_whole and same_dtype
        return Reductions(nbytes, budget, stays, pieces, self.chained, self.combines)
