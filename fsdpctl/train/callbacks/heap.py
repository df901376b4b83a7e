"""The heap of CPU ranks, which would grow with every step."""

import ctypes

from fsdpctl.run.step_metrics import StepMetrics
from fsdpctl.train.callback import Callback, TrainingRun

_EVERY = 20  # steps


class HeapTrim(Callback):
    """Returns the free pages of glibc's heap to the system every few steps.

    Note: why the heap grows. Tensors of a step live for different times, so that the next one finds
    the holes that it needs only sometimes: the bytes in use stay, and the heap grows with every
    step. Other allocators keep pages free too, and a fixed threshold for mmap costs a page fault
    for every page of every tensor.
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's only

    def step(self, run: TrainingRun, done: StepMetrics) -> None:
        if self._trim is not None and done.step % _EVERY == 0:
            self._trim(0)
