"""The heap of CPU ranks, measured by its resident pages."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from fsdpctl.comm.world import RECORDED_COLLECTIVES
from fsdpctl.run.step_metrics import StepMetrics
from fsdpctl.training.callback import Callback
from fsdpctl.training.callbacks.profiling import HeapTrim
from tests.commands.run import environment
from tests.distributed import distributed
from tests.training.ranks import made, words

MIB = 1 << 20


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


@distributed(timeout=60)
def fragment(rank: int, world_size: int) -> None:
    """Leave holes between small tensors that stay; then only a trim returns their pages."""
    made = [torch.ones(16 << 10) for _ in range(2000)]  # 64 KiB each
    kept = made[::8]
    full = resident()
    made.clear()
    torch.ones(1)
    HeapTrim().step(None, SimpleNamespace(step=19))  # type: ignore[arg-type]
    assert resident() > full - 30 * MIB
    HeapTrim().step(None, SimpleNamespace(step=20))  # type: ignore[arg-type]
    assert resident() < full - 90 * MIB
    assert len(kept) == 250


def test_holes_are_returned_to_the_system():
    fragment(world_size=1)


_RECORDING = f"""
import json
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from fsdpctl.comm.recorder import recorded
from fsdpctl.comm.world import joined_world

with joined_world("cpu", 60, dist.HashStore()):
    for _ in range({RECORDED_COLLECTIVES + 100}):
        dist.all_reduce(torch.ones(1))
    kept = json.loads(_distributed_c10d._dump_fr_trace_json(includeCollectives=True))
    print(len(kept["entries"]), *recorded().begun.values())
"""


def test_collectives_are_recorded_up_to_a_number_and_all_are_counted():
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _RECORDING],
        capture_output=True, text=True, env={**environment(), **place},
    )  # fmt: skip
    expected = f"{RECORDED_COLLECTIVES} {RECORDED_COLLECTIVES + 100}"
    assert done.stdout.strip() == expected, done.stderr


class _Watch(Callback):
    """Records the resident bytes after each trim."""

    def __init__(self) -> None:
        self.found: dict[int, int] = {}

    def step(self, run: Any, done: StepMetrics) -> None:
        if done.step % 20 == 0:
            self.found[done.step] = resident()


@distributed(timeout=500)
def run_long(rank: int, world_size: int, typed: list[str], result: str) -> None:
    """Train, and write what was recorded."""
    trainer = made(typed)
    watch = _Watch()
    trainer._callbacks = [*trainer._callbacks, watch]
    trainer.run()
    Path(f"{result}-{rank}.json").write_text(json.dumps(watch.found))


@pytest.mark.slow
def test_the_process_does_not_grow(tmp_path):
    more = [
        "train.steps=600", "train.global_batch_size=16", "checkpoint.every=0", "train.seq_len=128",
        f"train.run_dir={tmp_path}/run", "model.num_layers=4", "model.hidden_size=128",
        "model.intermediate_size=384", "model.num_heads=4",
    ]  # fmt: skip
    run_long(world_size=2, typed=words(tmp_path, 2, *more), result=str(tmp_path / "resident"))
    for rank in (0, 1):
        found = json.loads((tmp_path / f"resident-{rank}.json").read_text())
        assert found["600"] < 1.02 * found["200"], found
