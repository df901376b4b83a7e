"""What a CUDA device held when it had no room: a file for https://pytorch.org/memory_viz.

What is held then is known at no cost. Where each tensor was made is only known of those that were
watched since, which every allocation pays for: on request.
"""

from pathlib import Path

import torch

_MOST_ENTRIES = 100_000  # of the history; the file stays below some hundred megabytes


def watch_allocations(device: torch.device) -> None:
    """From now on remember where tensors are made, in lines of Python."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MOST_ENTRIES)


def keep_snapshot(error: BaseException, run_dir: Path, rank: int) -> None:
    """Where `error` is that a device has no room, write what it holds; the error then says where.

    What fails here is left out: the error itself is what matters.
    """
    if not isinstance(error, torch.OutOfMemoryError):
        return
    path = run_dir / f"memory-snapshot-rank-{rank:05d}.bin"
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    except Exception:
        return
    error.args = (
        f"{error}; what the device held is in {path}, which https://pytorch.org/memory_viz shows",
    )
