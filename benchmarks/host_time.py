"""What an engine costs the host: Python and kernel launches, with nothing sent.

    python -m benchmarks.host_time --out benchmarks/results/host-time.json

One process is rank 0 of many over torch's fake process group, whose collectives do nothing. The
blocks are tiny, so that what is left of a step is the engine's own time. Each collective is one
call, as over NCCL; streams and events of CUDA are not there. Engines take turns of three steps, of
which the first is not counted: it finds the processor's caches full of what another engine left.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdpctl
from benchmarks.report import write_report
from fsdpctl.comm.base import Gathering, Handle, InPlace, Reduction, Stretches
from fsdpctl.comm.mesh import make_mesh
from fsdpctl.comm.process_group import (
    ProcessGroupCollectives,
    all_gather_single,
    reduce_scatter_single,
)
from fsdpctl.engine.build import Division, Source, build_runtime, divide_module
from fsdpctl.engine.model import ShardedModel
from fsdpctl.plan.layout import Span
from fsdpctl.plan.strategy import get_strategy
from fsdpctl.plan.units import lay_out

BLOCKS, WIDTH = 12, 64
WARM_UP = 5  # rounds
TURN = 3  # steps
Timings = dict[str, float]  # seconds: "passes" of forward and backward, "update" of clip and step


class Block(nn.Module):
    """Sixteen parameters and next to no work."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        """A residual block."""
        for norm, layers in zip(self.norms, (self.layers[:3], self.layers[3:]), strict=True):
            x = x + sum((layer(norm(x)) for layer in layers), torch.zeros(()))
        return x


class Net(nn.Module):
    """The blocks between an embedding and a head: 197 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class OneCallEach(ProcessGroupCollectives):
    """Every collective is one call, in place."""

    adds_whole = True

    def gather_together(self, buffers: Sequence[Gathering]) -> Handle:
        """Into the whole of each."""
        for each in buffers:
            own: Span = each.parts[self.rank]
            source = each.whole[own.start : own.stop]
            if each.shard is not None:
                source.copy_(each.shard)
            all_gather_single(each.whole, source, group=self.gather_group)
        return Handle(lambda: buffers[0].whole)

    def all_gather(self, whole: Tensor, parts: Any, shard: Tensor | None) -> Handle:
        """Into `whole`."""
        return self.gather_together([Gathering(whole, parts, shard)])

    exchanges = False

    def sends_in_place(self, parts: Any) -> bool:
        """One buffer has all."""
        return False

    def reduce_scatter(self, gradients: Stretches, parts: Any, dtype: torch.dtype) -> Reduction:
        """Into this rank's part."""
        ((_, whole),) = gradients
        own: Span = parts[self.rank]
        part = whole[own.start : own.stop]
        reduce_scatter_single(part, whole, group=self.reduce_group)
        return InPlace(Handle(lambda: part))

    def start_all_reduce(self, values: Tensor, *, at_once: bool = True) -> Handle:
        """In place, as if all ranks had the same."""
        dist.all_reduce(values, group=self.reduce_group)
        return Handle(lambda: values.mul_(self.size))


def _timed(
    model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[], object]
) -> Callable[[Tensor], Timings]:
    def step(tokens: Tensor) -> Timings:
        began = time.perf_counter()
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        passed = time.perf_counter()
        clip()
        optimizer.step()
        ended = time.perf_counter()
        optimizer.zero_grad()
        return {"passes": passed - began, "update": ended - passed}

    return step


def _plain() -> Callable[[Tensor], Timings]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return _timed(model, optimizer, lambda: None)


def _fsdp2() -> Callable[[Tensor], Timings]:
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return _timed(model, optimizer, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def _ours() -> Callable[[Tensor], Timings]:
    net, row, collectives = Net(), get_strategy("full_shard"), OneCallEach()
    specs = divide_module(net, ["Block"])
    runtime = build_runtime(
        net,
        Division(specs, lay_out(specs, collectives.size)),
        make_mesh(collectives, torch.device("cpu"), collectives.size),
        Source(torch.device("cpu")),
        strategy=row,
        prefetch=fsdpctl.Prefetch(),
        precision=fsdpctl.Precision(),
    )
    model = ShardedModel(net, runtime, row)
    optimizer = fsdpctl.ShardedAdamW(model)
    return _timed(model, optimizer, lambda: fsdpctl.clip_grad_norm_(model, 1.0))


def measure(world_size: int, rounds: int) -> dict[str, Any]:
    """Medians over interleaved rounds, as rank 0 of `world_size`."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    steps = {"plain": _plain(), "fsdp2": _fsdp2(), "fsdpctl": _ours()}
    tokens = torch.randint(0, WIDTH, (1, 8))
    seconds: dict[str, list[Timings]] = {name: [] for name in steps}
    for number in range(WARM_UP + rounds):
        for name, step in steps.items():
            _, *counted = [step(tokens) for _ in range(TURN)]
            if number >= WARM_UP:
                seconds[name] += counted
    dist.destroy_process_group()
    medians = {
        name: {
            part: statistics.median(each[part] for each in of_name) for part in ("passes", "update")
        }
        for name, of_name in seconds.items()
    }
    added = {name: each["passes"] - medians["plain"]["passes"] for name, each in medians.items()}
    return {
        "world_size": world_size,
        "parameters": sum(1 for _ in Net().parameters()),
        "parameters_per_unit": sum(1 for _ in Block().parameters()),
        "passes_added_over_fsdp2_added": round(added["fsdpctl"] / added["fsdp2"], 4),
        "update_over_fsdp2_update": round(
            medians["fsdpctl"]["update"] / medians["fsdp2"]["update"], 4
        ),
        "passes_added_over_plain": {
            name: round(each / medians["plain"]["passes"], 4) for name, each in added.items()
        },
    }


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-sizes", default="8,64")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(int(size), words.rounds) for size in words.world_sizes.split(",")]
    for each in results:
        print(each, flush=True)
    write_report(words.out, "host_time", results, backend="fake", rounds=words.rounds)


if __name__ == "__main__":
    main()
