"""What the fullest rank holds, beside what was estimated before."""

from pathlib import Path

import torch

from fsdpctl.estimate.kept import read_estimate
from fsdpctl.run.metrics import peak_memory
from fsdpctl.run.progress import format_bytes
from fsdpctl.shards import TrainedModel
from fsdpctl.train.parts import Optimizer

_SETTLED = 3  # steps after which the allocator holds what it will hold


class MemoryCheck:
    """Compares, after a few steps, what the fullest rank has held with what was estimated."""

    def __init__(
        self, run_dir: Path, model: TrainedModel, optimizer: Optimizer, first_step: int
    ) -> None:
        """`first_step`: steps that were done before this start."""
        self._estimate = read_estimate(run_dir)
        self._model = model
        self._optimizer = optimizer
        self._at = first_step + _SETTLED

    def after(self, step: int, device: torch.device) -> str | None:
        """A line to be shown, once. Collective when it is due."""
        if step != self._at:
            return None
        memory = peak_memory(device)
        engine = engine_bytes(self._model, self._optimizer)
        held = (engine or 0, memory.allocated or 0, memory.reserved)
        every = self._model.collectives.gather_objects(held)
        largest, allocated, reserved = map(max, zip(*every, strict=True))
        estimate = self._estimate
        if estimate is None:
            return None
        if device.type == "cpu":
            if engine is None or estimate.peak_engine_bytes is None:
                return None
            what = _beside(largest, estimate.peak_engine_bytes)
            return f"memory: the engine held at most {what}; estimated of all tensors: " + (
                format_bytes(estimate.peak_allocated_bytes)
            )
        return (
            f"memory: at most {_beside(allocated, estimate.peak_allocated_bytes)} allocated, "
            f"{_beside(reserved, estimate.peak_reserved_bytes)} reserved"
        )


def engine_bytes(model: TrainedModel, optimizer: Optimizer) -> int | None:
    """The most that this rank's engine and optimizer have held; None: nobody has counted."""
    peak = model.peak_memory_bytes()
    return None if peak is None else peak + optimizer.memory_bytes()


def _beside(measured: int, estimated: int) -> str:
    if measured == estimated:
        return f"{format_bytes(measured)}, as estimated"
    off = estimated / measured - 1 if measured else 0.0
    return f"{format_bytes(measured)} (estimated {format_bytes(estimated)}, {off:+.1%})"
