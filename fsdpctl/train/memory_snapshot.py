"""A snapshot of CUDA memory after an out-of-memory error, for https://pytorch.org/memory_viz.

The allocations cost nothing to record. The Python lines that made them are recorded only on
request, since that slows down every allocation.
"""

from pathlib import Path

import torch

_MOST_ENTRIES = 100_000  # of the history; keeps the file below a few hundred MB


def watch_allocations(device: torch.device) -> None:
    """Record the Python lines that allocate tensors from now on."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MOST_ENTRIES)


def keep_snapshot(error: BaseException, run_dir: Path, rank: int) -> None:
    """Write a snapshot if `error` is out-of-memory, and add the file's path to the error.

    A failure to write it is ignored: the error itself matters more.
    """
    if not isinstance(error, torch.OutOfMemoryError):
        return
    path = run_dir / f"memory-snapshot-rank-{rank:05d}.bin"
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    except Exception:
        return
    error.args = (f"{error}; memory snapshot: {path} (open it at https://pytorch.org/memory_viz)",)
