"""One GPU: the time of a step, the memory it takes, and how much of the chip is used.

    python -m benchmarks.gpu --out benchmarks/results/gpu.json

`nccl1` is NCCL at world size 1, with the sharded path forced. `fake8` and `fake64` are rank 0 of so
many ranks over torch's fake process group: compute, kernels, copies and allocations are real, the
collectives do nothing, so losses mean nothing there. Times are medians of interleaved rounds in one
process; memory is measured in a process for each engine, where nobody shares the allocator.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdpctl
from benchmarks.contestants import BETAS, CONTESTANTS, DECAY, EPS, LR, Step, stepping
from benchmarks.host_time import OneCallEach
from benchmarks.report import write_report
from fsdpctl.comm.base import Collectives, Handle
from fsdpctl.comm.mesh import make_mesh
from fsdpctl.comm.nccl import NcclCollectives
from fsdpctl.config.model import ModelConfig
from fsdpctl.engine.build import Division, Source, build_runtime, divide_module
from fsdpctl.engine.model import ShardedModel
from fsdpctl.models.llama import LlamaDecoder
from fsdpctl.models.registry import initialize_parameter
from fsdpctl.plan.strategy import get_strategy
from fsdpctl.plan.units import lay_out
from fsdpctl.resolve.blocks import checkpoint_block
from fsdpctl.train.flops import ModelFlops, flops_per_token, peak_flops

WARM_UP = 4
BYTES_OF_STATE = 8  # of a parameter: value, gradient and two moments in bf16
ROOM = 10 << 30  # for activations, logits, and the units that compute


@dataclass(frozen=True, slots=True)
class Size:
    """A Llama-style decoder, and a batch for it."""

    width: int
    blocks: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    samples: int
    length: int


SIZES = {
    "tiny": Size(64, 3, 4, 2, 128, 512, 2, 32),  # to see that all of this runs, anywhere
    "364M": Size(1024, 24, 16, 16, 2816, 32000, 2, 1024),
    "1.4B": Size(2048, 16, 32, 8, 7168, 128256, 2, 4096),
    "8B": Size(4096, 32, 32, 8, 14336, 128256, 1, 4096),
}
TIMED = ("fsdp2", "fsdp2_tuned", "full_shard", "bf16_wire")
ALONE = ("fsdp2", "full_shard")  # whose memory is measured
MODES = {"nccl1": 1, "fake8": 8, "fake64": 64}


def _config(size: Size) -> ModelConfig:
    return ModelConfig(
        num_layers=size.blocks,
        hidden_size=size.width,
        intermediate_size=size.hidden,
        num_heads=size.heads,
        num_kv_heads=size.kv_heads,
        vocab_size=size.vocab,
        tie_embeddings=False,
    )


def _shapes(size: Size) -> LlamaDecoder:
    with torch.device("meta"):
        return LlamaDecoder(_config(size), size.width // size.heads, size.vocab)


def make_model(size: Size, device: torch.device) -> LlamaDecoder:
    """With values, on the device."""
    model = _shapes(size).to_empty(device=device)
    with torch.no_grad():
        for name, param in model.named_parameters():
            initialize_parameter(name, param, seed=0, config=ModelConfig())
    return model


class FakeNccl(NcclCollectives):
    """As if every rank had the same to say in the small all-reduces."""

    def start_all_reduce(self, values: Tensor, *, at_once: bool = True) -> Handle:
        """The sum over equal ranks."""
        handle = super().start_all_reduce(values)
        return Handle(lambda: handle.wait().mul_(self.size))


def collectives_on(device: torch.device) -> Collectives:
    """Of the process group that was joined; on the CPU none."""
    if device.type == "cpu":
        return OneCallEach()
    return NcclCollectives(device) if dist.get_backend() == "nccl" else FakeNccl(device)


def ours(model: nn.Module, device: torch.device, precision: fsdpctl.Precision) -> Step:
    """fsdpctl's engine under full_shard, whatever the number of ranks."""
    collectives, row = collectives_on(device), get_strategy("full_shard")
    specs = divide_module(model, None)
    runtime = build_runtime(
        model,
        Division(specs, lay_out(specs, collectives.size)),
        make_mesh(collectives, device, collectives.size),
        Source(device),
        strategy=row,
        prefetch=fsdpctl.Prefetch(),
        precision=precision,
    )
    sharded = ShardedModel(model, runtime, row)
    optimizer = fsdpctl.ShardedAdamW(sharded, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    return stepping(sharded, optimizer)


def make_step(name: str, size: Size, device: torch.device) -> Step:
    """One engine, ready to step, in bf16 with fp32 reduction."""
    if name == "full_shard":
        return ours(make_model(size, device), device, fsdpctl.Precision(torch.bfloat16))
    if name == "bf16_wire":
        precision = fsdpctl.Precision(torch.bfloat16, wire_dtype=torch.bfloat16)
        return ours(make_model(size, device), device, precision)
    if name == "recomputing":
        model = make_model(size, device).to(torch.bfloat16)
        for block in model.model.layers:
            checkpoint_block(block, "full")
        return ours(model, device, fsdpctl.Precision(*[torch.bfloat16] * 3))
    return CONTESTANTS[name](make_model(size, device), torch.bfloat16, device)


def _join(mode: str, device: torch.device, folder: str) -> None:
    size = MODES[mode]
    if size > 1 or device.type == "cpu":
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    else:
        store = FileStore(str(Path(folder) / "rendezvous"), 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)


def _batch(size: Size, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, size.samples, size.length)
    tokens, targets = torch.randint(0, size.vocab, shape, generator=generator).to(device).unbind()
    return tokens, targets


def _seconds(step: Step, batch: tuple[Tensor, Tensor], device: torch.device) -> float:
    _synchronize(device)
    began = time.perf_counter()
    step(*batch)
    _synchronize(device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(words: argparse.Namespace) -> dict[str, Any]:
    """What one process measures: engines interleaved, or the memory of a single one."""
    device = torch.device(words.device)
    with tempfile.TemporaryDirectory() as folder:
        _join(words.mode, device, folder)
        size, names = fitting(SIZES[words.size], device), words.engines.split(",")
        batch = _batch(size, device)
        steps = {name: make_step(name, size, device) for name in names}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(WARM_UP + words.rounds):
            for name, step in steps.items():
                seconds[name].append(_seconds(step, batch, device))
        losses = {name: float(step(*batch)) for name, step in steps.items()}
        dist.destroy_process_group()
    medians = {name: statistics.median(each[WARM_UP:]) for name, each in seconds.items()}
    tokens = size.samples * size.length
    speeds = {name: tokens / seconds for name, seconds in medians.items()}
    found: dict[str, Any] = {"blocks": size.blocks, "losses": losses}
    found["tokens_per_second"] = {name: round(speed, 1) for name, speed in speeds.items()}
    if device.type == "cuda":
        found["mfu"] = _mfu(size, speeds)
    if "fsdp2" in medians:
        found["over_fsdp2"] = {n: round(m / medians["fsdp2"], 4) for n, m in medians.items()}
    if device.type == "cuda":
        found["peak_allocated"] = torch.cuda.max_memory_allocated(device)
        found["peak_reserved"] = torch.cuda.max_memory_reserved(device)
    return found


def fitting(size: Size, device: torch.device) -> Size:
    """With as many of its blocks as leave room for activations where all states are bf16."""
    if size is not SIZES["8B"] or device.type == "cpu":
        return size
    room = torch.cuda.get_device_properties(device).total_memory - ROOM
    blocks = size.blocks
    while _num_params(replace(size, blocks=blocks)) * BYTES_OF_STATE > room:
        blocks -= 1
    return replace(size, blocks=blocks)


def _num_params(size: Size) -> int:
    return sum(param.numel() for param in _shapes(size).parameters())


def _mfu(size: Size, speeds: dict[str, float]) -> dict[str, float | None]:
    """By torchtitan's count."""
    per_token = flops_per_token(_config(size), _num_params(size), size.length)
    flops = ModelFlops(per_token, peak_flops(torch.cuda.get_device_name()))
    return {name: flops.utilization(speed) for name, speed in speeds.items()}


def _run(words: argparse.Namespace, **other: Any) -> dict[str, Any]:
    told = {"device": words.device, "rounds": words.rounds, **other}
    options = [text for name, value in told.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "benchmarks.gpu", "--child", *options]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def measure_all(words: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every size and mode; the largest model alone, for how much of the chip is used."""
    for size in words.sizes.split(","):
        if size == "8B":
            found = _run(words, mode="nccl1", size=size, engines="recomputing")
            yield {"size": size, "mode": "nccl1", **found}
            continue
        for mode in words.modes.split(","):
            both = _run(words, mode=mode, size=size, engines=",".join(TIMED))
            alone = {name: _run(words, mode=mode, size=size, engines=name) for name in ALONE}
            memory = {
                name: {key: each[key] for key in ("peak_allocated", "peak_reserved") if key in each}
                for name, each in alone.items()
            }
            both = {k: v for k, v in both.items() if not k.startswith("peak")}
            yield {"size": size, "mode": mode, **both, "memory": memory}


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", default="364M,1.4B,8B")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--mode", choices=list(MODES), help=argparse.SUPPRESS)
    parser.add_argument("--size", choices=list(SIZES), help=argparse.SUPPRESS)
    parser.add_argument("--engines", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.child:
        print(json.dumps(measure(words)))
        return
    chip = torch.cuda.get_device_name() if words.device == "cuda" else "cpu"
    results = []
    for each in measure_all(words):
        results.append(each)
        print(each, flush=True)
        write_report(words.out, "gpu", results, device=chip, rounds=words.rounds)


if __name__ == "__main__":
    main()
