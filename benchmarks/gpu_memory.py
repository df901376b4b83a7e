"""One GPU: what rank 0 of up to a thousand ranks holds, beside what was estimated without it.

    python -m benchmarks.gpu_memory --out benchmarks/results/gpu-memory.json

Over torch's fake process group, whose collectives do nothing: compute, kernels and allocations are
real. Random configurations, each in a process of its own, four steps.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.gpu import collectives_on
from benchmarks.report import write_report
from benchmarks.training import train_step
from fsdpctl.comm.mesh import make_mesh
from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import Config
from fsdpctl.engine.build import Division, Source, build_runtime, divide_module
from fsdpctl.engine.model import ShardedModel
from fsdpctl.engine.precision import Precision
from fsdpctl.estimate.estimator import Estimator, placed_for_estimate
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.models.registry import initialize_parameter
from fsdpctl.plan.schedule import Prefetch
from fsdpctl.plan.strategy import get_strategy
from fsdpctl.plan.units import lay_out
from fsdpctl.resolve.machine import resolved_strategy, world_size
from fsdpctl.train.assemble import make_module, make_optimizer

_GIB = 1 << 30
_STEPS = 4
_SMALLEST = 1 * _GIB  # of an estimate: below, what does not belong to a model weighs too much
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def draw_words(draw: random.Random, models: list[str]) -> list[str]:
    """A configuration as it is typed."""
    model, micro = draw.choice(models), draw.choice([1, 2, 4])
    passes = draw.choice([1, 1, 2])
    ranks = draw.choice([8, 16, 64, 256, 1024])
    layers = draw.choice([4, 8, 12])
    return [
        f"model={model}",
        f"model.num_layers={layers}",
        f"strategy={draw.choice(['full_shard', 'full_shard', 'shard_grad_op', 'no_shard'])}",
        "launch.device=cuda",
        f"launch.nproc_per_node={ranks}",
        f"launch.allocator={draw.choice(['expandable', 'native'])}",
        f"precision={draw.choice(['bf16', 'bf16', 'bf16_true', 'fp32'])}",
        f"prefetch={draw.choice(['both', 'backward', 'none'])}",
        f"accumulation={draw.choice(['every', 'last'])}",
        f"accumulation.steps={passes}",
        f"activation_checkpointing={draw.choice(['none', 'selective', 'full'])}",
        f"train.seq_len={draw.choice([512, 1024])}",
        f"train.micro_batch_size={micro}",
        f"train.global_batch_size={ranks * micro * passes}",
        f"train.loss_chunk_tokens={draw.choice(['auto', '0', '1024'])}",
    ]


def resolved(words: list[str], device: str) -> Config:
    """Of a configuration that is placed."""
    given = [f"launch.device={device}" if w.startswith("launch.device") else w for w in words]
    placed = placed_for_estimate(compose_config([*given, "cluster=h200"]).config)
    return replace(placed, strategy=resolved_strategy(placed, placed.strategy))


def measure(words: list[str], device: torch.device) -> dict[str, int | None]:
    """What the steps of one configuration take."""
    config = resolved(words, device.type)
    ranks, row = world_size(config), get_strategy(config.strategy.name)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    module = make_module(config)
    specs = divide_module(module, None)
    collectives = collectives_on(device)
    precision = config.precision
    dtypes = precision.dtypes
    runtime = build_runtime(
        module,
        Division(specs, lay_out(specs, collectives.size)),
        make_mesh(collectives, device, collectives.size),
        Source(device, partial(initialize_parameter, seed=0, config=config.model)),
        strategy=row,
        prefetch=Prefetch(config.prefetch.forward, config.prefetch.backward),
        precision=Precision(*(_DTYPES[str(name)] for name in dtypes)),
    )
    model = ShardedModel(module, runtime, row)
    optimizer = make_optimizer(config, model)
    for _ in range(_STEPS):
        train_step(config, model, optimizer, device)
    dist.destroy_process_group()
    if device.type != "cuda":
        return {"peak_allocated": None, "peak_reserved": None}
    return {
        "peak_allocated": torch.cuda.max_memory_allocated(device),
        "peak_reserved": torch.cuda.max_memory_reserved(device),
    }


def _measured(words: list[str], found: RunEstimate, device: str) -> dict[str, Any]:
    grows = found.config.launch.allocator == "expandable"
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": f"expandable_segments:{grows}"}
    command = [sys.executable, "-m", "benchmarks.gpu_memory", "--device", device, "--child", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        return {"words": words, "failed": done.returncode}
    answer = json.loads(done.stdout.splitlines()[-1])
    estimated = {"peak_allocated": found.allocated, "peak_reserved": found.peak_reserved}
    errors = {
        f"{name}_error": round(estimated[name] / answer[name] - 1, 5)
        for name in estimated
        if answer[name]
    }
    return {"words": words, "measured": answer, "estimated": estimated, **errors}


def measure_all(words: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Random configurations that the device has room for."""
    draw, estimator, found_so_far = random.Random(0), Estimator(), 0
    room = words.gib * _GIB
    while found_so_far < words.count:
        typed = draw_words(draw, words.models.split(","))
        found = estimator.estimate(resolved(typed, words.device))
        if _SMALLEST * (words.device == "cuda") <= found.peak_reserved <= room:
            found_so_far += 1
            yield _measured(typed, found, words.device)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default="llama3_1b,llama3_8b,qwen3_4b,gpt2")
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--gib", type=int, default=110, help="what a configuration may take")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.child:
        print(json.dumps(measure(words.child, torch.device(words.device))))
        return
    chip = torch.cuda.get_device_name() if words.device == "cuda" else "cpu"
    results = []
    for each in measure_all(words):
        results.append(each)
        print(each, flush=True)
        write_report(words.out, "gpu_memory", results, device=chip)
    for name in ("peak_allocated_error", "peak_reserved_error"):
        errors = [abs(each[name]) for each in results if name in each]
        if errors:
            print(f"{name}: median {median(errors):.2%}, worst {max(errors):.2%}")


if __name__ == "__main__":
    main()
