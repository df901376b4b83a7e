"""Runs that others measured and published, weighed again.

From torchtitan's repository: benchmarks/llama3_h100_202412_torchtitan.md, table 1 (8 B: reserved),
and pull request 165 (7 B: allocated and reserved, as shares of 95.0396 GiB).
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.engine.build import divide_module
from fsdpctl.memory.allocator import CachingAllocator
from fsdpctl.memory.compute import Program
from fsdpctl.memory.fsdp2_steps import FullyShard, FullyShardSteps
from fsdpctl.memory.script import Category, Writer
from fsdpctl.memory.shorten import shorten
from fsdpctl.memory.simulate import Constant, Script, settle
from fsdpctl.memory.trace import trace
from fsdpctl.plan.replay import Itemsizes
from fsdpctl.train.blocks import checkpoint_block
from tests.memory.titan import LLAMA_7B, LLAMA_8B, Shape, Titan

GIB = 1 << 30
CUBLAS = [Constant(Category.WORKSPACES, "cuBLAS workspace", 32 << 20)] * 2


def weighed(
    shape: Shape, length: int, checkpointing: str, run: Callable[[nn.Module], object]
) -> CachingAllocator:
    """On eight ranks, in bfloat16 with float32 reduction, and AdamW tensor by tensor."""
    with torch.device("meta"):
        model = Titan(shape, length)
    units = divide_module(model, None)
    rows = shorten(model, [unit.name for unit in units if unit.kind == "block"])
    blocks = [name for row in rows for name in row.traced]
    for name in blocks:
        checkpoint_block(model.get_submodule(name), checkpointing)
    for param in model.parameters():
        param.data = param.data.to(torch.bfloat16)
    others = [unit.name for unit in units[1:] if unit.kind != "block"]
    passed = trace(model, [*blocks, *others], lambda: run(model), "cuda")
    assert all(row.is_regular(passed) for row in rows)
    program = Program(passed, [unit.name for unit in units[1:]], rows)
    writer = Writer(program, units[-1].name, last_is_head=True)
    sharded = FullyShard(units, 8, Itemsizes(2, 4, 4), True, 1, (True,), fused=False)
    script = Script(writer, FullyShardSteps(sharded, writer), draws=False, constants=CUBLAS)
    allocator = CachingAllocator(streams=writer.streams)
    settle(script, allocator)
    return allocator


def tokens(batch: int, length: int) -> Tensor:
    return torch.empty(batch, length, dtype=torch.int64)


def test_llama_8b_with_selective_checkpointing():
    def run(model: nn.Module) -> None:
        predicted = model(tokens(2, 8192))
        wanted = tokens(2, 8192)
        loss = F.cross_entropy(predicted.flatten(0, 1).float(), wanted.flatten(0, 1))
        del predicted
        loss.backward()

    found = weighed(LLAMA_8B, 8192, "selective", run)
    assert found.peak_reserved / GIB == pytest.approx(82.4, rel=0.05)


def test_llama_7b_with_full_checkpointing():
    kept: list[Tensor] = []

    def run(model: nn.Module) -> None:
        predicted = model(tokens(8, 2048)).float()
        kept[:] = [predicted]  # until the next forward has returned
        wanted = tokens(8, 2048)
        F.cross_entropy(predicted.flatten(0, 1), wanted.flatten(0, 1)).backward()

    found = weighed(LLAMA_7B, 2048, "full", run)
    assert found.peak_allocated / GIB == pytest.approx(22.73, rel=0.03)
    assert found.peak_reserved / GIB == pytest.approx(31.02, rel=0.05)
