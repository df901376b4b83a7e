"""Memory of a rank: the heap of CPU ranks, and snapshots after an out-of-memory error.

A snapshot is for https://pytorch.org/memory_viz. Recording allocations costs nothing. The Python
lines that allocate are recorded only on request, because they slow down every allocation.
"""

import ctypes
from pathlib import Path

import torch

from fsdpctl.run.step_metrics import StepMetrics
from fsdpctl.training.trainer import Callback, Trainer

_STEPS_BETWEEN_TRIMS = 20
_MOST_ENTRIES = 100_000  # of the history; keeps the file below a few hundred MB


class HeapTrim(Callback):
    """Returns the free pages of glibc's heap to the system every few steps.

    Note: why the heap grows. Tensors of a step live for different times, so that the next one finds
    the holes that it needs only sometimes: the bytes in use stay, and the heap grows with every
    step. Other allocators keep pages free too, and a fixed threshold for mmap costs a page fault
    for every page of every tensor.
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's only

    def step(self, run: Trainer, done: StepMetrics) -> None:
        if self._trim is not None and done.step % _STEPS_BETWEEN_TRIMS == 0:
            self._trim(0)


def watch_allocations(device: torch.device) -> None:
    """Record the Python lines that allocate tensors from now on."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MOST_ENTRIES)


def write_snapshot(error: BaseException, run_dir: Path, rank: int) -> None:
    """Write a snapshot, if possible, of an out-of-memory `error`, and name its file there."""
    if not isinstance(error, torch.OutOfMemoryError):
        return
    path = run_dir / f"memory-snapshot-rank-{rank:05d}.bin"
    try:
        path.unlink(missing_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
    except Exception:
        return
    error.args = (f"{error}; memory snapshot: {path} (open it at https://pytorch.org/memory_viz)",)
