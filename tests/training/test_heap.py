"""The heap of CPU ranks, measured by its resident pages."""

import subprocess
import sys
from types import SimpleNamespace

import psutil
import torch

from fsdpctl.comm.world import RECORDED_COLLECTIVES
from fsdpctl.training.callbacks.memory import HeapTrim
from tests.commands.run import environment
from tests.distributed import distributed

MIB = 1 << 20


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


@distributed(world_size=1, timeout=60)
def test_holes_are_returned_to_the_system(rank: int, world_size: int) -> None:
    """Leave holes between small tensors that stay; then only a trim returns their pages."""
    tensors = [torch.ones(16 << 10) for _ in range(2000)]  # 64 KiB each
    remaining = tensors[::8]
    full = resident()
    tensors.clear()
    torch.ones(1)
    HeapTrim().on_step(None, SimpleNamespace(step=19))  # type: ignore[arg-type]
    assert resident() > full - 30 * MIB
    HeapTrim().on_step(None, SimpleNamespace(step=20))  # type: ignore[arg-type]
    assert resident() < full - 90 * MIB
    assert len(remaining) == 250


_RECORDING = f"""
import json
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from fsdpctl.comm.flight_recorder import read_record
from fsdpctl.comm.world import joined_world

with joined_world("cpu", 60, dist.HashStore()):
    for _ in range({RECORDED_COLLECTIVES + 100}):
        dist.all_reduce(torch.ones(1))
    kept = json.loads(_distributed_c10d._dump_fr_trace_json(includeCollectives=True))
    print(len(kept["entries"]), *read_record().started.values())
"""


def test_collectives_are_recorded_up_to_a_number_and_all_are_counted():
    environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _RECORDING],
        capture_output=True, text=True, env={**environment(), **environ},
    )  # fmt: skip
    expected = f"{RECORDED_COLLECTIVES} {RECORDED_COLLECTIVES + 100}"
    assert done.stdout.strip() == expected, done.stderr
