"""What was estimated of a run's memory, kept beside it, and what was then measured."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdpctl.engine.model import ShardedModel
from fsdpctl.errors import UsageError
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.reading.documents import read_json
from fsdpctl.train.footprint import estimate_run
from fsdpctl.train.machine import placed_on_cluster
from fsdpctl.train.metrics import peak_memory
from fsdpctl.train.progress import format_bytes
from fsdpctl.train.resolve import ResolvedRun
from fsdpctl.train.run_estimate import RunEstimate
from fsdpctl.train.weigh import Weigher

ESTIMATE = "estimate.json"
_SETTLED = 3  # steps after which the allocator holds what it will hold


@dataclass(frozen=True, slots=True)
class Expected:
    """The most that the fullest rank was estimated to hold, in bytes."""

    allocated: int
    reserved: int
    engine: int  # of allocated, what the engine owns


def weigh_run(run: ResolvedRun) -> RunEstimate:
    """The estimate for a run on this machine."""
    return Weigher().weigh(placed_on_cluster(run.config))


def write_expected(run_dir: Path, run: ResolvedRun, found: RunEstimate) -> None:
    """Keep the estimate for a run in its directory."""
    engine = estimate_run(run.config, run.module, run.batches.num_micro_batches)
    text = json.dumps({**found.to_dict(), "peak_engine_bytes": engine.peak_bytes}, indent=2)
    (run_dir / ESTIMATE).write_text(text + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Kept:
    """What of estimate.json is compared."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_engine_bytes: int


def read_expected(run_dir: Path) -> Expected | None:
    """What was kept, if it was."""
    try:
        kept = read_json(run_dir / ESTIMATE, _Kept)
    except UsageError:
        return None  # nothing depends on it
    return Expected(kept.peak_allocated_bytes, kept.peak_reserved_bytes, kept.peak_engine_bytes)


class MemoryCheck:
    """Compares, after a few steps, what the fullest rank has held with what was estimated."""

    def __init__(
        self, run_dir: Path, model: ShardedModel, optimizer: ShardedAdamW, first_step: int
    ) -> None:
        """`first_step`: steps that were done before this start."""
        self._expected = read_expected(run_dir)
        self._model = model
        self._optimizer = optimizer
        self._at = first_step + _SETTLED

    def after(self, step: int, device: torch.device) -> str | None:
        """A line to be shown, once. Collective when it is due."""
        if step != self._at:
            return None
        memory = peak_memory(device)
        engine = self._model.peak_memory_bytes() + self._optimizer.memory_bytes()
        held = (engine, memory.allocated or 0, memory.reserved)
        every = self._model.collectives.gather_objects(held)
        engine, allocated, reserved = map(max, zip(*every, strict=True))
        expected = self._expected
        if expected is None:
            return None
        if device.type == "cpu":
            what = _beside(engine, expected.engine)
            return f"memory: the engine held at most {what}; estimated of all tensors: " + (
                format_bytes(expected.allocated)
            )
        return (
            f"memory: at most {_beside(allocated, expected.allocated)} allocated, "
            f"{_beside(reserved, expected.reserved)} reserved"
        )


def _beside(measured: int, estimated: int) -> str:
    if measured == estimated:
        return f"{format_bytes(measured)}, as estimated"
    off = estimated / measured - 1 if measured else 0.0
    return f"{format_bytes(measured)} (estimated {format_bytes(estimated)}, {off:+.1%})"
