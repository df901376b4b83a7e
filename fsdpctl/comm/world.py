"""Starting and ending the process group of this worker."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class World:
    """Who this worker is among all."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device


@contextmanager
def joined_world(device_type: str, timeout_seconds: float) -> Iterator[World]:
    """The process group that torchrun's environment describes, ended when the block ends well.

    After an exception it stays, and the process should end at once: to end the group takes all
    ranks, over NCCL also what they have in flight, and they may wait for this one.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if device_type == "cuda" else None,
    )
    yield World(rank, local_rank, world_size, device)
    # Without it gloo's threads may abort the process while the interpreter ends.
    dist.destroy_process_group()
