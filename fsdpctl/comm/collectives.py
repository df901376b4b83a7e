"""Which collectives serve the ranks of this run."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdpctl.comm.base import Collectives, LocalCollectives
from fsdpctl.comm.gloo import GlooCollectives
from fsdpctl.comm.nccl import NcclCollectives


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
