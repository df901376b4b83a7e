"""Memory of a rank: the heap of CPU ranks, and snapshots after an out-of-memory error.

https://pytorch.org/memory_viz shows a snapshot. The Python lines that allocate are recorded only if
`log.memory_snapshot` is set, because it slows down every allocation.
"""

import ctypes
from pathlib import Path

import torch

from fsdpctl.run.step_metrics import StepMetrics
from fsdpctl.training.trainer import Callback, Trainer

_STEPS_BETWEEN_TRIMS = 20
_MOST_ENTRIES = 100_000  # entries of the history; a file then has at most a few hundred MB


class HeapTrim(Callback):
    """A callback that returns free pages of glibc's heap to the system every 20 steps.

    It has no effect with another C library.

    Note: without this, the heap grows with every step, although the bytes in use do not. Tensors of
    a step are freed at different times, so the tensors of the next step often do not fit into the
    freed ranges. Other allocators keep free pages too, and a fixed threshold for mmap costs a page
    fault for every page of every tensor.
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # in glibc only

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        if self._trim is not None and metrics.step % _STEPS_BETWEEN_TRIMS == 0:
            self._trim(0)


def watch_allocations(device: torch.device) -> None:
    """Record the Python lines that allocate tensors on a CUDA device.

    The history in a snapshot begins at this call.
    """
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MOST_ENTRIES)


def write_snapshot(error: BaseException, run_dir: Path, rank: int) -> None:
    """After an out-of-memory `error`, write a snapshot and add its file to the error's message.

    Does nothing for other errors, or if the snapshot cannot be written.
    """
    if not isinstance(error, torch.OutOfMemoryError):
        return
    path = run_dir / f"memory-snapshot-rank-{rank:05d}.bin"
    try:
        path.unlink(missing_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
    except Exception:
        return
    error.args = (f"{error}; memory snapshot: {path} (open it at https://pytorch.org/memory_viz)",)
