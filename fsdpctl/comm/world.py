"""Starting and ending the process group of this worker."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdpctl.comm.stores import PrefixStore, Store, TCPStore


@dataclass(frozen=True, slots=True)
class World:
    """Who this worker is among all."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device


@contextmanager
def joined_world(
    device_type: str, timeout_seconds: float, store: Store | None = None
) -> Iterator[World]:
    """The process group that torchrun's environment describes, ended when the block ends well.

    Ranks meet in `store`; without one at MASTER_ADDR and MASTER_PORT, where their launcher has
    opened one, among what lies there of this round (FSDPCTL_ROUND).

    After an exception it stays, and the process should end at once: to end the group takes all
    ranks, over NCCL also what they have in flight, and they may wait for this one.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if device_type == "cuda":
        # A launcher of ranks may show each of them its own device alone.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if store is None:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
        store=PrefixStore(f"ranks-{os.environ.get('FSDPCTL_ROUND', 0)}", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if device_type == "cuda" else None,
    )
    yield World(rank, local_rank, world_size, device)
    # Without it gloo's threads may abort the process while the interpreter ends.
    dist.destroy_process_group()
