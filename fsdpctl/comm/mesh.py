"""The two axes of data parallelism: ranks that share one copy, and copies of the same part.

dp_shard_size = 2 on 4 ranks            dp_shard ->
                                         rank 0   rank 1     one copy
                          dp_replicate   rank 2   rank 3     another
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdpctl.comm.base import Collectives, Handle, Reduction
from fsdpctl.comm.collectives import collectives_for
from fsdpctl.comm.nccl import NcclCollectives
from fsdpctl.comm.waits import CudaWaits, Seconds

# What follows, and of a reduction that was started: where its mean goes, the scale, and the dtype
# that is added in.
Chain = Callable[
    [Callable[[Tensor], Handle], Reduction, Tensor, float, torch.dtype], tuple[Handle, Handle]
]


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's groups."""

    world: Collectives
    shard: Collectives  # the ranks that share a copy with this one
    replicas: Collectives | None  # the ranks that hold the same part; None where there is one copy

    def take_waits(self) -> Seconds:
        """How long computation has waited for any of them since the last time."""
        taken = [each.waits.take() for each in self._groups()]
        return lambda: sum(seconds() for seconds in taken)

    def measure_waits(self) -> None:
        """Have waiting counted on CUDA too."""
        for each in self._groups():
            if isinstance(each.waits, CudaWaits):
                each.waits.measures = True

    def _groups(self) -> list[Collectives]:
        found = [self.world, self.shard, *([self.replicas] if self.replicas else [])]
        return list({id(each): each for each in found}.values())

    @property
    def chain(self) -> Chain | None:
        """What lets the sum over copies follow a reduction at once, where there are streams."""
        if self.replicas is None or not isinstance(self.shard, NcclCollectives):
            return None
        return self.shard.chain

    @property
    def num_replicas(self) -> int:
        """How many copies there are."""
        return self.replicas.size if self.replicas else 1

    @property
    def replica_rank(self) -> int:
        """Which of them this rank has a part of."""
        return self.replicas.rank if self.replicas else 0


def make_mesh(world: Collectives, device: torch.device, dp_shard_size: int) -> Mesh:
    """Divide the world into copies of `dp_shard_size` neighbouring ranks. Collective.

    `dp_shard_size` divides the number of ranks.
    """
    if dp_shard_size == world.size:
        world.separate_reductions()
        return Mesh(world, world, None)
    starts = range(0, world.size, dp_shard_size)
    copies = [range(start, start + dp_shard_size) for start in starts]
    same_part = [range(part, world.size, dp_shard_size) for part in range(dp_shard_size)]
    shard = collectives_for(device, copies)
    shard.separate_reductions()
    return Mesh(world, shard, collectives_for(device, same_part))
