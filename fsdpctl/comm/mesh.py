"""The groups of ranks on both axes of data parallelism, and their collectives.

dp_shard_size = 2 on 4 ranks            dp_shard ->
                                         rank 0   rank 1     one replica
                          dp_replicate   rank 2   rank 3     another
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdpctl.comm.collectives import Collectives
from fsdpctl.comm.gloo import GlooCollectives
from fsdpctl.comm.nccl import NcclCollectives
from fsdpctl.comm.process_group import Groups, T, all_gather_values
from fsdpctl.comm.shared_memory import NotShared, SharedCollectives
from fsdpctl.comm.waits import CudaWaits, GetWaitSeconds
from fsdpctl.plan.step_plan import MeshPosition

_OBJECT_TIMEOUT = timedelta(days=1)  # disks may be slow; a rank's exit ends it at once


def _is_alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def collectives_for(
    device: torch.device, groups: Groups | None = None, purpose: str = "gather"
) -> Collectives:
    """Return the collectives of this rank's group in `groups`, or of all ranks.

    Collectives with another `purpose` have their own process group, so that both may overlap.
    """
    if _is_alone() or (groups is not None and len(groups[0]) == 1):
        return Collectives()
    if device.type == "cuda":
        return NcclCollectives(device, groups, purpose)
    return GlooCollectives(groups, purpose)


def shared_memory_collectives() -> Collectives:
    """Return collectives of all ranks over shared memory, on the CPU. Collective.

    If the ranks cannot share memory, the collectives use gloo, and `not_shared_reason` is set.
    """
    if _is_alone():
        return Collectives()
    try:
        return SharedCollectives()
    except NotShared as error:
        over_gloo = GlooCollectives()
        over_gloo.not_shared_reason = str(error)
        return over_gloo


class ObjectExchange:
    """A process group of all ranks for a thread that communicates while training runs."""

    def __init__(self) -> None:
        is_alone = _is_alone()
        self._group = None if is_alone else dist.new_group(backend="gloo", timeout=_OBJECT_TIMEOUT)
        self.rank, self.size = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())

    def all_gather_values(self, value: T) -> list[T]:
        return [value] if self._group is None else all_gather_values(value, self._group)


@dataclass(frozen=True, slots=True)
class Mesh:
    """The groups that this rank belongs to."""

    world: Collectives
    shard: Collectives  # the ranks of this rank's replica; `world` itself if there is one replica
    replicas: Collectives | None  # the ranks with the same shard; None if there is one replica

    def take_waits(self) -> GetWaitSeconds:
        """Return a function for the exposed communication, in seconds, since the last call."""
        waits = [each.waits.take() for each in self._groups()]
        return lambda: sum(seconds() for seconds in waits)

    def measure_waits(self) -> None:
        for each in self._groups():
            if isinstance(each.waits, CudaWaits):
                each.waits.measures = True

    def _groups(self) -> list[Collectives]:
        groups = [self.world, self.shard, *([self.replicas] if self.replicas else [])]
        return list({id(each): each for each in groups}.values())

    @property
    def chaining(self) -> NcclCollectives | None:
        """`shard`, if it enqueues the sum over replicas right behind a reduction."""
        return self.shard if self.replicas and isinstance(self.shard, NcclCollectives) else None

    @property
    def position(self) -> MeshPosition:
        shard, replicas = self.shard, self.replicas or Collectives()
        return MeshPosition(shard.rank, shard.size, replicas.size, shard.transport, replicas.rank)


def make_mesh(world: Collectives, device: torch.device, dp_shard_size: int) -> Mesh:
    """Divide the ranks into replicas of `dp_shard_size`, a divisor of their number. Collective."""
    if dp_shard_size == world.size:
        world.use_separate_reduce_group()
        return Mesh(world, shard=world, replicas=None)
    starts = range(0, world.size, dp_shard_size)
    shard_groups = [range(start, start + dp_shard_size) for start in starts]
    replica_groups = [range(index, world.size, dp_shard_size) for index in range(dp_shard_size)]
    shard = collectives_for(device, shard_groups)
    shard.use_separate_reduce_group()
    return Mesh(world, shard, collectives_for(device, replica_groups))
