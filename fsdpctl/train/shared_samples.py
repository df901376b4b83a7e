"""The exchange between ranks that share samples."""

import torch

from fsdpctl.comm.collectives import collectives_for
from fsdpctl.models.context import use_exchange
from fsdpctl.plan.batch import context_groups


def share_samples(device: torch.device, num_ranks: int, context_parallel: int) -> None:
    """Let attention exchange with the ranks that share this one's samples. Collective."""
    if context_parallel > 1:
        groups = context_groups(num_ranks, context_parallel)
        use_exchange(collectives_for(device, groups, "context").all_to_all)
