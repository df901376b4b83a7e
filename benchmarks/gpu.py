"""One GPU: the time of a step, its memory, and the share of the chip's peak FLOP/s.

    python -m benchmarks.gpu --out benchmarks/results/gpu.json

`nccl1` is NCCL with one rank, with the sharded path forced. `fake8` and `fake64` are rank 0 of 8
and 64 ranks over torch's fake process group, where losses have no meaning (benchmarks/one_gpu.py).
Times are medians of interleaved rounds in one process. Memory is measured in a separate process
for each engine, so that engines do not share an allocator.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import fsdpctl
from benchmarks.contestants import BETAS, CONTESTANTS, DECAY, EPS, LR, Step, stepping
from benchmarks.one_gpu import DEVICE, draw, joined, sharded
from benchmarks.report import arguments, write_report
from fsdpctl.comm.nccl import NcclCollectives
from fsdpctl.config.clusters import gpu_by_name
from fsdpctl.config.compose import compose_config
from fsdpctl.config.model import ModelConfig
from fsdpctl.engine.blocks import checkpoint_block
from fsdpctl.engine.build import Sharding, WeightInit
from fsdpctl.models.build_model import build_base_model
from fsdpctl.models.small_copy import allocate
from fsdpctl.models.transformers_build import fill_buffers
from fsdpctl.models.transformers_decoder import TransformersDecoder
from fsdpctl.run.step_metrics import ModelFlops, flops_per_token

WARM_UP = 4
BYTES_OF_STATE = 8  # of a parameter: value, gradient and two moments in bf16
ROOM = 10 << 30  # bytes for activations, logits and unsharded units


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
    "tiny": Size(64, 3, 4, 2, 128, 512, 2, 32),  # a functional test on any device
    "364M": Size(1024, 24, 16, 16, 2816, 32000, 2, 1024),
    "1.4B": Size(2048, 16, 32, 8, 7168, 128256, 2, 4096),
    "8B": Size(4096, 32, 32, 8, 14336, 128256, 1, 4096),
    "tiny8B": Size(64, 3, 4, 2, 128, 512, 1, 32),
}
LARGEST = ("8B", "tiny8B")  # with as many blocks as fit, to measure the share of the peak FLOP/s
TIMED = ("fsdp2", "fsdp2_tuned", "full_shard")
ALONE = ("fsdp2", "full_shard")  # engines whose memory is measured
MODES = {"nccl1": 1, "fake8": 8, "fake64": 64}


def _config(size: Size) -> ModelConfig:
    args = [
        f"model.num_layers={size.blocks}", f"model.hidden_size={size.width}",
        f"model.intermediate_size={size.hidden}", f"model.num_heads={size.heads}",
        f"model.num_kv_heads={size.kv_heads}", f"model.vocab_size={size.vocab}",
        "model.overrides.tie_word_embeddings=false",
    ]  # fmt: skip
    return compose_config(args).config.model


def make_model(size: Size) -> TransformersDecoder:
    """Return the model with initial weights, on the device."""
    model = build_base_model(_config(size))
    fill_buffers(model)
    allocate(model)
    model.to(DEVICE)
    for name, param in model.named_parameters():
        draw(name, param)
    return model


def ours(model: nn.Module, nccl: NcclCollectives, precision: fsdpctl.Precision) -> Step:
    """Return a step of fsdpctl's engine with full_shard, even on a single rank."""
    sharding = Sharding(prefetch=fsdpctl.Prefetch(), precision=precision)
    sharded_model = sharded(model, nccl, sharding, source=WeightInit(DEVICE))
    optimizer = fsdpctl.ShardedAdamW(sharded_model, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    return stepping(sharded_model, optimizer)


def make_step(name: str, size: Size, nccl: NcclCollectives) -> Step:
    """Return a step of one engine, in bf16 with fp32 reduction."""
    model = make_model(size)
    if name == "full_shard":
        return ours(model, nccl, fsdpctl.Precision(torch.bfloat16))
    if name == "recomputing":
        model = model.to(torch.bfloat16)
        for block in model.get_submodule("model.layers").children():
            checkpoint_block(block, "full")
        return ours(model, nccl, fsdpctl.Precision(*[torch.bfloat16] * 3))
    return CONTESTANTS[name](model, torch.bfloat16, DEVICE)


def _batch(size: Size) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, size.samples, size.length)
    tokens, targets = torch.randint(0, size.vocab, shape, generator=generator).to(DEVICE).unbind()
    return tokens, targets


def _seconds(step: Step, batch: tuple[Tensor, Tensor]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    step(*batch)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure in one process: interleaved engines, or the memory of a single engine."""
    world_size = MODES[options.mode]
    with joined(world_size, fake=world_size > 1) as nccl:
        size, names = fitting(options.size), options.engines.split(",")
        batch = _batch(size)
        steps = {name: make_step(name, size, nccl) for name in names}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(WARM_UP + options.rounds):
            for name, step in steps.items():
                seconds[name].append(_seconds(step, batch))
        losses = {name: float(step(*batch)) for name, step in steps.items()}
    medians = {name: statistics.median(each[WARM_UP:]) for name, each in seconds.items()}
    tokens = size.samples * size.length
    speeds = {name: tokens / seconds for name, seconds in medians.items()}
    result: dict[str, Any] = {"blocks": size.blocks, "losses": losses}
    result["step_seconds"] = {name: round(each, 5) for name, each in medians.items()}
    result["tokens_per_second"] = {name: round(speed, 1) for name, speed in speeds.items()}
    result["mfu"] = _mfu(size, speeds)
    if "fsdp2" in medians:
        result["over_fsdp2"] = {n: round(m / medians["fsdp2"], 4) for n, m in medians.items()}
    result["peak_allocated"] = torch.cuda.max_memory_allocated()
    result["peak_reserved"] = torch.cuda.max_memory_reserved()
    return result


def fitting(name: str) -> Size:
    """Return a size; sizes in LARGEST have the blocks that leave room for activations."""
    size = SIZES[name]
    if name not in LARGEST:
        return size
    memory = torch.cuda.get_device_properties(DEVICE).total_memory
    room = memory - min(ROOM, memory // 2)
    blocks = size.blocks
    while _num_params(replace(size, blocks=blocks)) * BYTES_OF_STATE > room:
        blocks -= 1
    return replace(size, blocks=blocks)


def _num_params(size: Size) -> int:
    return sum(param.numel() for param in build_base_model(_config(size)).parameters())


def _mfu(size: Size, speeds: dict[str, float]) -> dict[str, float | None]:
    """Return the share of the chip's peak FLOP/s, computed as in torchtitan."""
    per_token = flops_per_token(_config(size), _num_params(size), size.length)
    gpu = gpu_by_name(torch.cuda.get_device_name())
    flops = ModelFlops(per_token, None if gpu is None else gpu.peak_flops)
    return {name: flops.utilization(speed) for name, speed in speeds.items()}


def _run(options: argparse.Namespace, **other: Any) -> dict[str, Any]:
    values = {"rounds": options.rounds} | other
    texts = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "benchmarks.gpu", "--child", *texts]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def measure_all(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure every size in every mode; the largest model alone."""
    for size in options.sizes.split(","):
        if size in LARGEST:
            result = _run(options, mode="nccl1", size=size, engines="recomputing")
            yield {"size": size, "mode": "nccl1", **result}
            continue
        for mode in options.modes.split(","):
            result = _run(options, mode=mode, size=size, engines=",".join(TIMED))
            both = {k: v for k, v in result.items() if not k.startswith("peak")}
            if MODES[mode] > 1:
                both["memory"] = {name: _memory(options, mode, size, name) for name in ALONE}
            yield {"size": size, "mode": mode, **both}


def _memory(options: argparse.Namespace, mode: str, size: str, engine: str) -> dict[str, int]:
    result = _run(options, rounds=1, mode=mode, size=size, engines=engine)
    return {key: result[key] for key in ("peak_allocated", "peak_reserved")}


def main() -> None:
    """Run the sizes and modes of the command line."""
    child = {"child": False, "mode": "", "size": "", "engines": ""}  # for its child processes
    options = arguments(sizes="364M,1.4B,8B", modes=",".join(MODES), rounds=12, **child)
    if options.child:
        print(json.dumps(measure(options)))
        return
    chip = torch.cuda.get_device_name()
    results = []
    for each in measure_all(options):
        results.append(each)
        print(each, flush=True)
        write_report(options.out, "gpu", results, device=chip, rounds=options.rounds)


if __name__ == "__main__":
    main()
