"""The time of a step with compressed states or weights, and losses with the states, on the CPU.

    python -m benchmarks.little_memory --out benchmarks/results/little-memory.json

Steps alternate, so that the load of the machine is the same for all. Runs of training differ by the
seed, which sets the weights and the order of the data; each seed is trained in every way.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import arguments, write_report
from fsdpctl.config.compose import compose_config
from fsdpctl.engine.model import ShardedModel
from fsdpctl.resolve.machine import placed_on_cluster
from fsdpctl.train.assemble import make_model
from fsdpctl.train.optimizers import make_optimizer
from fsdpctl.train.step import Optimizer
from tests.train_step import train_step

SPLIT_MASTERS = "precision.master_dtype=bfloat16+int8"
BF16 = "precision=bf16"
WAYS = {
    "float32": [BF16],
    "bfloat16 moments": [BF16, "optimizer.state_dtype=bfloat16"],
    "int8 moments": [BF16, "optimizer.state_dtype=int8"],
    "24-bit master weights": [BF16, SPLIT_MASTERS],
    "int8 moments, 24-bit master weights": [BF16, "optimizer.state_dtype=int8", SPLIT_MASTERS],
    # Loses small updates: shows that the comparison detects a loss.
    "bfloat16 master weights and moments": [BF16, "precision.master_dtype=bfloat16"],
}
BASELINE = "float32"
BASES = {  # of adapters; both compute in float32
    "adapters, float32 weights": ["precision=fp32", "model.lora.rank=8"],
    "adapters, NF4 weights": ["precision=fp32", "model.lora.rank=8", "model.base_dtype=nf4"],
}
LAST = 25  # steps whose training loss counts
MODEL = ["launch.device=cpu", "launch.nproc_per_node=1"]
RUN = [
    "train.seq_len=64", "train.micro_batch_size=8", "train.global_batch_size=8",
    "train.eval_every=0", "train.final_eval_batches=200", "train.sample_tokens=0",
    "checkpoint.every=0",
]  # fmt: skip


class Trained:
    """A model that is trained in one way, and the time that it took."""

    def __init__(self, settings: list[str], width: int) -> None:
        shape = ["model.num_layers=4", f"model.hidden_size={width}", "model.vocab_size=256"]
        shape += [f"model.intermediate_size={3 * width}", "train.seq_len=256"]
        shape += ["train.micro_batch_size=4", "train.global_batch_size=4", "accumulation.steps=1"]
        self.config = placed_on_cluster(compose_config([*MODEL, *shape, *settings]).config)
        self.model = make_model(self.config, torch.device("cpu"))
        self.optimizer = make_optimizer(self.config, self.model)
        self.updates: list[float] = []
        self.steps: list[float] = []

    def step(self) -> None:
        """Time an update of the optimizer alone, and a step."""
        self.model(torch.randint(256, (1, 16))).float().square().mean().backward()
        scale, finite = torch.tensor(2.0), torch.zeros(())  # as the trainer clips
        start = time.perf_counter()
        self.optimizer.step(grad_scale=scale, found_inf=finite)
        self.updates.append(time.perf_counter() - start)
        self.optimizer.zero_grad()
        start = time.perf_counter()
        train_step(self.config, self.model, self.optimizer)
        self.steps.append(time.perf_counter() - start)


def time_steps(width: int, rounds: int) -> dict[str, Trained]:
    """Return what was trained in each way; the first of the rounds is left out."""
    made = {name: Trained(settings, width) for name, settings in (WAYS | BASES).items()}
    for _ in range(1 + rounds):
        for each in made.values():
            each.step()
    for each in made.values():
        del each.updates[0], each.steps[0]
    return made


def _bytes(model: ShardedModel, optimizer: Optimizer) -> tuple[float, float]:
    shards = list(model.flat_shards())
    numel = sum(shard.master.numel() for shard in shards)
    kept = [shard.master for shard in shards]
    kept += [shard.remainder for shard in shards if shard.remainder is not None]
    at_rest = sum(each.nbytes for each in kept) + optimizer.memory_bytes()
    gradients = sum(shard.master.numel() * shard.grad_dtype.itemsize for shard in shards)
    return round(at_rest / numel, 3), round((2 * at_rest + gradients) / numel, 3)


def train(name: str, seed: int, steps: int) -> tuple[float, float]:
    """Return the mean training loss of the last steps and the validation loss of a run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fsdpctl", "train", *MODEL, *RUN, *WAYS[name]]
        command += [f"train.steps={steps}", f"train.seed={seed}", f"train.run_dir={folder}/run"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        text = (Path(folder) / "run" / "metrics.jsonl").read_text()
    lines = list(map(json.loads, text.splitlines()))
    trained = statistics.mean([line["loss"] for line in lines if "loss" in line][-LAST:])
    (validated,) = (line["val_loss"] for line in lines if "val_loss" in line)
    print(f"{name}, seed {seed}: train {trained:.4f}, validation {validated:.4f}", flush=True)
    return trained, validated


def _way(name: str, made: dict[str, Trained], losses: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the results of one way; losses are listed by seed."""
    found, base = made[name], made[BASELINE]
    at_rest, moved = _bytes(found.model, found.optimizer)
    trained, validated = map(list, zip(*losses, strict=True))
    return {
        "name": name,
        "bytes_per_parameter": at_rest,  # of master weights and moments
        "moved_bytes_per_parameter": moved,  # by the optimizer, with gradients: read and written
        "update_seconds": statistics.median(found.updates),
        "update_over_float32": _median_ratio(found.updates, base.updates),
        "step_over_float32": _median_ratio(found.steps, base.steps),
        "train_losses": trained,
        "validation_losses": validated,
    }


def _median_ratio(seconds: list[float], of: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(seconds, of, strict=True)), 3)


def main() -> None:
    """Measure, print and write."""
    given = arguments(width=512, rounds=15, seeds=5, steps=1000)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    seeds = range(given.seeds)
    losses = {(seed, name): train(name, seed, given.steps) for seed in seeds for name in WAYS}
    made = time_steps(given.width, given.rounds)
    results = [_way(name, made, [losses[seed, name] for seed in seeds]) for name in WAYS]
    plain, packed = (made[name].steps for name in BASES)
    results.append({"name": "adapters", "nf4_over_float32": _median_ratio(packed, plain)})
    print(*results, sep="\n")
    config, shards = made[BASELINE].config, made[BASELINE].model.flat_shards()
    about = {
        "parameters": sum(shard.master.numel() for shard in shards),
        "tokens": config.train.seq_len * config.train.global_batch_size,
    }
    about |= {"rounds": given.rounds, "steps": given.steps, "last_steps": LAST}
    write_report(given.out, "little_memory", results, **about)


if __name__ == "__main__":
    main()
