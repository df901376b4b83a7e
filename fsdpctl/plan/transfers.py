"""How the ranks of a strategy reduce gradients: decided here for the engine and its predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdpctl.plan.layout import FlatLayout
from fsdpctl.plan.reductions import Itemsize, Reductions, Transport, plan_reductions
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

    @property
    def collects(self) -> bool:
        """Whether units larger than every block are reduced in pieces."""
        return self.strategy.shards_params and self.size > 1

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
        """Plan the reductions; `same_dtype`: gradients are kept in the dtype of the sum."""
        return plan_reductions(
            layouts,
            itemsize,
            stays=self.adds_whole and same_dtype,
            blocks=order.blocks if self.collects else (),
            chained=self.chained,
            combines=self.combines,
        )
