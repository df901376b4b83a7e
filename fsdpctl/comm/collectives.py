"""Which collectives serve the ranks of this run."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdpctl.comm.base import Collectives, LocalCollectives
from fsdpctl.comm.exchange import T, exchange
from fsdpctl.comm.gloo import GlooCollectives
from fsdpctl.comm.nccl import NcclCollectives

_PATIENCE = timedelta(days=1)  # disks may be slow; a rank that dies is noticed at once


def collectives_for(
    device: torch.device, groups: Sequence[Sequence[int]] | None = None
) -> Collectives:
    """Collectives among the ranks of this rank's group, or of this process alone.

    Args:
        device: where the tensors lie.
        groups: a division of all ranks; None is one group of all.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return LocalCollectives()
    if groups is not None and len(groups[0]) == 1:
        return LocalCollectives()
    return NcclCollectives(device, groups) if device.type == "cuda" else GlooCollectives(groups)


class ObjectExchange:
    """All ranks, with a process group of their own: a thread may talk while training does."""

    def __init__(self) -> None:
        """Collective."""
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._group = None if alone else dist.new_group(backend="gloo", timeout=_PATIENCE)
        self.rank = 0 if alone else dist.get_rank()
        self.size = 1 if alone else dist.get_world_size()

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's value, in rank order."""
        return [value] if self._group is None else exchange(value, self._group)
