"""Selection of the collectives for the ranks of this run."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdpctl.comm.base import Collectives
from fsdpctl.comm.gloo import GlooCollectives
from fsdpctl.comm.nccl import NcclCollectives
from fsdpctl.comm.process_group import T, exchange

_PATIENCE = timedelta(days=1)  # disks may be slow; a rank that exits is noticed at once


def collectives_for(
    device: torch.device, groups: Sequence[Sequence[int]] | None = None
) -> Collectives:
    """Return the collectives of this rank's group in `groups`, or of all ranks."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if alone or (groups is not None and len(groups[0]) == 1):
        return Collectives()
    return NcclCollectives(device, groups) if device.type == "cuda" else GlooCollectives(groups)


class ObjectExchange:
    """A process group of all ranks for a thread that communicates while training runs."""

    def __init__(self) -> None:
        """Create the group. Collective."""
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._group = None if alone else dist.new_group(backend="gloo", timeout=_PATIENCE)
        self.rank = 0 if alone else dist.get_rank()
        self.size = 1 if alone else dist.get_world_size()

    def gather_objects(self, value: T) -> list[T]:
        """Return the values of all ranks in rank order."""
        return [value] if self._group is None else exchange(value, self._group)
