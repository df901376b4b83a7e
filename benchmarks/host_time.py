"""The host's time per step of an engine: Python and kernel launches, without communication.

    python -m benchmarks.host_time --out benchmarks/results/host-time.json

One process is rank 0 of many over torch's fake process group, whose collectives do nothing. The
blocks are tiny, so that a step takes little more than the engine's time. On the CPU, each
collective is one call, as over NCCL, without CUDA's streams and events. Engines take turns of three
steps. The first step of a turn is not counted, because another engine has filled the caches.

With `--device cuda`, the device sleeps while the host works, so that only the host is timed. Then a
step must have fewer than the 1,024 launches that a stream queues: pass `--blocks 4`.

With `--vocabulary 8192`, the embedding and the head are larger than a block. Their gradients are
collected and reduced in pieces, each of which has a slice of every rank's shard.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdpctl
from benchmarks.one_gpu import DEVICE, FakeNccl, sharded
from benchmarks.report import arguments, write_report
from fsdpctl.comm.collectives import (
    AllGatherInput,
    Collectives,
    Handle,
    InPlaceReduction,
    Reduction,
)
from fsdpctl.comm.process_group import (
    ProcessGroupCollectives,
    all_gather_single,
    reduce_scatter_single,
)
from fsdpctl.engine.build import Sharding, WeightInit
from fsdpctl.plan.layout import Span
from fsdpctl.plan.step_plan import Transport

WIDTH = 64
_CYCLES = 200_000_000  # about a tenth of a second
WARM_UP = 5  # rounds
TURN = 3  # steps
Timings = dict[str, float]  # seconds: "passes" of forward and backward, "update" of clip and step


class Block(nn.Module):
    """A block with sixteen parameters and almost no computation."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        """Compute a residual block."""
        for norm, layers in zip(self.norms, (self.layers[:3], self.layers[3:]), strict=True):
            x = x + sum((layer(norm(x)) for layer in layers), torch.zeros(()))
        return x


class Net(nn.Module):
    """A network of an embedding, blocks and a head: 197 parameters with 12 blocks."""

    def __init__(self, blocks: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class OneCallEach(ProcessGroupCollectives):
    """Collectives of one call each, in place."""

    transport = Transport.NCCL

    def all_gather(self, buffers: Sequence[AllGatherInput]) -> Handle:
        """Gather into each full buffer."""
        for each in buffers:
            local_span: Span = each.spans[self.rank]
            source = each.full[local_span.start : local_span.stop]
            if each.shard is not None:
                source.copy_(each.shard)
            all_gather_single(each.full, source, group=self.group)
        return Handle(lambda: buffers[0].full)

    def reduce_scatter(self, whole: Tensor, parts: Any) -> Reduction:
        """Reduce into this rank's part."""
        local_part: Span = parts[self.rank]
        part = whole[local_part.start : local_part.stop]
        reduce_scatter_single(part, whole, group=self.reduce_group)
        return InPlaceReduction(Handle(lambda: part))

    def start_all_reduce(self, values: Tensor) -> Handle:
        """Sum in place, as if all ranks had equal values."""
        dist.all_reduce(values, group=self.reduce_group)
        return Handle(lambda: values.mul_(self.size))


@dataclass(frozen=True, slots=True)
class Setting:
    """The options that all engines share."""

    device: torch.device
    blocks: int
    vocabulary: int

    def net(self) -> Net:
        """Return the model, on the device."""
        with self.device:
            return Net(self.blocks, self.vocabulary)


def _timed(
    model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[], object]
) -> Callable[[Tensor], Timings]:
    def step(tokens: Tensor) -> Timings:
        woken = _put_to_sleep() if tokens.is_cuda else None
        began = time.perf_counter()
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        passed = time.perf_counter()
        clip()
        optimizer.step()
        ended = time.perf_counter()
        asleep = 0.0 if woken is None or woken.query() else 1.0
        optimizer.zero_grad()
        return {"passes": passed - began, "update": ended - passed, "asleep": asleep}

    return step


def _put_to_sleep() -> torch.cuda.Event:
    """Make the device sleep; the event is over once it wakes up."""
    torch.cuda.synchronize()
    torch.cuda._sleep(_CYCLES)
    woken: torch.cuda.Event = torch.cuda.current_stream().record_event()
    return woken


def _plain(setting: Setting) -> Callable[[Tensor], Timings]:
    model = setting.net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return _timed(model, optimizer, lambda: None)


def _fsdp2(setting: Setting) -> Callable[[Tensor], Timings]:
    model = setting.net()
    mesh = init_device_mesh(setting.device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return _timed(model, optimizer, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def _ours(setting: Setting) -> Callable[[Tensor], Timings]:
    device = setting.device
    collectives: Collectives = FakeNccl(device) if device.type == "cuda" else OneCallEach()
    sharding = Sharding(prefetch=fsdpctl.Prefetch(), precision=fsdpctl.Precision())
    blocks, source = ["Block"], WeightInit(device)
    model = sharded(setting.net(), collectives, sharding, source=source, blocks=blocks)
    optimizer = fsdpctl.ShardedAdamW(model)
    return _timed(model, optimizer, lambda: fsdpctl.clip_grad_norm_(model, 1.0))


def measure(world_size: int, rounds: int, setting: Setting) -> dict[str, Any]:
    """Return medians over interleaved rounds, as rank 0 of `world_size`."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    steps = {"plain": _plain(setting), "fsdp2": _fsdp2(setting), "fsdpctl": _ours(setting)}
    tokens = torch.randint(0, WIDTH, (1, 8), device=setting.device)
    seconds: dict[str, list[Timings]] = {name: [] for name in steps}
    for number in range(WARM_UP + rounds):
        for name, step in steps.items():
            _, *counted = [step(tokens) for _ in range(TURN)]
            if number >= WARM_UP:
                seconds[name] += counted
    dist.destroy_process_group()
    medians = {
        name: {
            key: statistics.median(each[key] for each in of_name) for key in ("passes", "update")
        }
        for name, of_name in seconds.items()
    }
    on_device = {} if setting.device.type == "cpu" else _on_device(seconds, medians, setting)
    updates = {name: each["update"] for name, each in medians.items()}
    added = {name: each["passes"] - medians["plain"]["passes"] for name, each in medians.items()}
    return {
        "world_size": world_size,
        "parameters": sum(1 for _ in setting.net().parameters()),
        "parameters_per_unit": sum(1 for _ in Block().parameters()),
        "passes_added_over_fsdp2_added": round(added["fsdpctl"] / added["fsdp2"], 4),
        "update_over_fsdp2_update": round(updates["fsdpctl"] / updates["fsdp2"], 4),
        "passes_added_over_plain": {
            name: round(each / medians["plain"]["passes"], 4) for name, each in added.items()
        },
        **on_device,
    }


def _on_device(
    seconds: dict[str, list[Timings]], medians: dict[str, Timings], setting: Setting
) -> dict[str, Any]:
    """Return host seconds, and the share of steps that ended before the device woke up."""
    every = [each["asleep"] for of_name in seconds.values() for each in of_name]
    return {
        "passes_seconds_per_unit": {
            name: round(each["passes"] / setting.blocks, 7) for name, each in medians.items()
        },
        "update_seconds": {name: round(each["update"], 7) for name, each in medians.items()},
        "asleep": round(statistics.mean(every), 4),
    }


def main() -> None:
    """Measure, print and write."""
    options = arguments(world_sizes=(8, 64), rounds=150, device="cpu", blocks=12, vocabulary=WIDTH)
    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.cuda.set_device(DEVICE)
    device = DEVICE if options.device == "cuda" else torch.device("cpu")
    setting = Setting(device, options.blocks, options.vocabulary)
    results = [measure(size, options.rounds, setting) for size in options.world_sizes]
    print(*results, sep="\n")
    kwargs = {"backend": "fake", "rounds": options.rounds, "vocabulary": options.vocabulary}
    if options.device == "cuda":
        kwargs["device"] = torch.cuda.get_device_name()
    write_report(options.out, "host_time", results, **kwargs)


if __name__ == "__main__":
    main()
