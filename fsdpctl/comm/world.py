"""The process group of this worker, and the stores of its rendezvous."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # exported, though not in __all__
    DistStoreError,
    PrefixStore,
    Store,
    TCPStore,
)

# The launcher imports torch's stores from here, since torch does not export them officially.
__all__ = ["DistStoreError", "PrefixStore", "Store", "TCPStore", "World", "joined_world"]


@dataclass(frozen=True, slots=True)
class World:
    """This worker's rank and device."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device


# Torch's flight recorder stores 2,000 collectives over gloo by default, and a rank's memory grows
# by megabytes until the recorder is full. 500 collectives exceed a step of most models on CPUs.
RECORDED_COLLECTIVES = 500


@contextmanager
def joined_world(device_type: str, timeout: float, store: Store | None = None) -> Iterator[World]:
    """Join the process group that torchrun's environment describes, and leave it after the block.

    The rendezvous uses `store`, by default the launcher's store at MASTER_ADDR and MASTER_PORT,
    with a prefix for the current restart round (FSDPCTL_ROUND).

    After an exception, the group is not destroyed and the process should exit at once. Destroying a
    group needs all ranks, and over NCCL the end of their collectives in flight. Other ranks may be
    waiting for this rank in a collective, so this rank would hang.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if device_type == "cuda":
        # Slurm, for example, may make a single device visible to each rank.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED_COLLECTIVES))
    if store is None:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
        store=PrefixStore(f"ranks-{os.environ.get('FSDPCTL_ROUND', 0)}", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
        device_id=device if device_type == "cuda" else None,
    )
    yield World(rank, local_rank, world_size, device)
    # Without this, gloo's threads may abort the process while the interpreter exits.
    dist.destroy_process_group()
