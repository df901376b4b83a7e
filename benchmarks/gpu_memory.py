"""One GPU: the memory of rank 0 of up to a thousand ranks, measured and estimated.

    python -m benchmarks.gpu_memory --out benchmarks/results/gpu-memory.json

Random configurations run four steps over torch's fake process group (benchmarks/one_gpu.py), each
in a separate process. Processes import concurrently, and take turns on the device.
"""

import argparse
import fcntl
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.one_gpu import DEVICE, draw, joined, sharded
from benchmarks.report import arguments, write_report
from fsdpctl.comm.nccl import NcclCollectives
from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import Resolved
from fsdpctl.engine.build import Sharding, WeightInit
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.plan.step_plan import Prefetch
from fsdpctl.resolve.launchers import ESTIMATE_ROLE
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import RunPlan, make_run_plan
from fsdpctl.training.assemble import make_module, make_optimizer
from tests.train_step import train_step

_GIB = 1 << 30
_STEPS = 4
_AT_ONCE = 4  # processes, of which one computes and the others import


def draw_settings(draw: random.Random, models: list[str], lengths: list[str]) -> list[str]:
    """Draw the settings of one configuration."""
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
        f"train.seq_len={draw.choice(lengths)}",
        f"train.micro_batch_size={micro}",
        f"train.global_batch_size={ranks * micro * passes}",
        f"train.loss_chunk_tokens={draw.choice(['auto', '0', '1024'])}",
    ]


def resolved(args: list[str]) -> RunPlan:
    """Return the plan of a configuration on H200s."""
    return make_run_plan(prepare(compose_config([*args, "cluster=h200"]), ESTIMATE_ROLE).config)


def measure(args: list[str]) -> dict[str, int]:
    """Return the memory of the steps of one configuration."""
    config = resolved(args).config
    with joined(config.num_ranks, fake=True) as nccl:
        _train(config, nccl)
    return {
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
    }


def _train(config: Resolved, nccl: NcclCollectives) -> None:
    sharding = Sharding(
        prefetch=Prefetch(config.prefetch.forward, config.prefetch.backward),
        precision=config.precision.planned,
    )
    source, strategy = WeightInit(DEVICE, draw), config.strategy.name
    model = sharded(make_module(config), nccl, sharding, source=source, strategy=strategy)
    optimizer = make_optimizer(config, model)
    for _ in range(_STEPS):
        train_step(config, model, optimizer, DEVICE)


def _measured(turn: str, args: list[str], result: RunEstimate) -> dict[str, Any]:
    grows = result.config.launch.allocator == "expandable"
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": f"expandable_segments:{grows}"}
    command = [sys.executable, "-m", "benchmarks.gpu_memory", "--turn", turn, "--child", *args]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        return {"words": args, "failed": done.returncode}
    answer = json.loads(done.stdout.splitlines()[-1])
    estimated = {"peak_allocated": result.allocated, "peak_reserved": result.peak_reserved}
    errors = {f"{name}_error": round(estimated[name] / answer[name] - 1, 5) for name in estimated}
    return {"words": args, "measured": answer, "estimated": estimated, **errors}


def drawn(options: argparse.Namespace) -> Iterator[tuple[list[str], RunEstimate]]:
    """Yield random configurations that fit on the device, with their estimates."""
    chance, estimator, count = random.Random(0), Estimator(), 0
    room = 0.9 * torch.cuda.get_device_properties(DEVICE).total_memory
    while count < options.count:
        typed = draw_settings(chance, options.models.split(","), options.lengths.split(","))
        result = estimator.estimate(resolved(typed))
        if options.smallest * _GIB <= result.peak_reserved <= room:
            count += 1
            yield typed, result


def measure_all(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the measurements of random configurations as they end."""
    with tempfile.NamedTemporaryFile() as turn, ThreadPoolExecutor(_AT_ONCE) as pool:
        pending: deque[Future[dict[str, Any]]] = deque()
        for each in drawn(options):
            pending.append(pool.submit(_measured, turn.name, *each))
            while pending and pending[0].done():
                yield pending.popleft().result()
        for left in pending:
            yield left.result()


def main() -> None:
    """Run the configurations of the command line."""
    models = "llama3_1b,llama3_8b,qwen3_4b,gpt2"
    # Below the smallest estimate in GiB, memory that does not belong to a model weighs too much.
    defaults = {"models": models, "lengths": "512,1024", "count": 24, "smallest": 1.0}
    options = arguments(**defaults, turn=Path, child=())
    if options.child:
        # Never closed: the lock is released with the device's memory, when the process ends.
        fcntl.flock(os.open(options.turn, os.O_RDONLY), fcntl.LOCK_EX)
        print(json.dumps(measure(options.child)))
        return
    chip = torch.cuda.get_device_name()
    results = []
    for each in measure_all(options):
        results.append(each)
        print(each, flush=True)
        write_report(options.out, "gpu_memory", results, device=chip)
    for name in ("peak_allocated_error", "peak_reserved_error"):
        errors = [abs(each[name]) for each in results if name in each]
        if errors:
            print(f"{name}: median {median(errors):.2%}, worst {max(errors):.2%}")


if __name__ == "__main__":
    main()
