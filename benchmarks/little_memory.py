"""The time of a step with compressed states, and the losses of training with them, on the CPU.

    python -m benchmarks.little_memory --out benchmarks/results/little-memory.json

Steps of the optimizer alone alternate. Runs of training differ by the seed, which sets the weights
and the order of the data; each seed is trained in every way.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.report import write_report
from fsdpctl.config.compose import compose_config
from fsdpctl.engine.model import ShardedModel
from fsdpctl.resolve.machine import placed_on_cluster
from fsdpctl.train.assemble import make_model
from fsdpctl.train.optimizers import make_optimizer
from fsdpctl.train.step import Optimizer

SPLIT_MASTERS = "precision.master_dtype=bfloat16+int8"
WAYS = {  # all compute in bf16
    "float32": [],
    "bfloat16 moments": ["optimizer.state_dtype=bfloat16"],
    "int8 moments": ["optimizer.state_dtype=int8"],
    "24-bit master weights": [SPLIT_MASTERS],
    "int8 moments, 24-bit master weights": ["optimizer.state_dtype=int8", SPLIT_MASTERS],
    # Loses small updates: shows that the comparison detects a loss.
    "bfloat16 master weights and moments": ["precision.master_dtype=bfloat16"],
}
BASELINE = "float32"
LAST = 25  # steps whose training loss counts
MODEL = ["launch.device=cpu", "launch.nproc_per_node=1", "precision=bf16"]
RUN = [
    "train.seq_len=64", "train.micro_batch_size=8", "train.global_batch_size=8",
    "train.eval_every=0", "train.final_eval_batches=200", "train.sample_tokens=0",
    "checkpoint.every=0",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Way:
    """The results of one way of storing the states."""

    name: str
    bytes_per_parameter: float  # of master weights and moments
    moved_bytes_per_parameter: float  # read and written in a step, gradients included
    step_seconds: float
    step_over_float32: float  # median of the ratios of a round
    train_losses: list[float]  # by seed
    validation_losses: list[float]


def stepped(name: str, width: int) -> tuple[ShardedModel, Optimizer]:
    """Return a model with gradients, and its optimizer."""
    shape = ["model.num_layers=4", f"model.hidden_size={width}", "model.vocab_size=256"]
    shape += [f"model.intermediate_size={3 * width}"]
    config = placed_on_cluster(compose_config([*MODEL, *shape, *WAYS[name]]).config)
    model = make_model(config, torch.device("cpu"))
    optimizer = make_optimizer(config, model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randint(256, (1, 16))).float().square().mean().backward()
        optimizer.step()
    return model, optimizer


def time_steps(width: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of each round, and bytes per parameter at rest and moved."""
    made = {name: stepped(name, width) for name in WAYS}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    scale, finite = torch.tensor(2.0), torch.zeros(())  # as the trainer clips
    for _ in range(rounds):
        for name, (_, optimizer) in made.items():
            start = time.perf_counter()
            optimizer.step(grad_scale=scale, found_inf=finite)
            seconds[name].append(time.perf_counter() - start)
    return seconds, {name: _bytes(*each) for name, each in made.items()}


def _bytes(model: ShardedModel, optimizer: Optimizer) -> list[float]:
    shards = list(model.flat_shards())
    numel = sum(shard.master.numel() for shard in shards)
    kept = [shard.master for shard in shards]
    kept += [shard.remainder for shard in shards if shard.remainder is not None]
    at_rest = sum(each.nbytes for each in kept) + optimizer.memory_bytes()
    gradients = sum(shard.grad.nbytes for shard in shards if shard.grad is not None)
    return [round(at_rest / numel, 3), round((2 * at_rest + gradients) / numel, 3)]


def train(name: str, seed: int, steps: int, folder: Path) -> tuple[float, float]:
    """Return the mean training loss of the last steps and the validation loss of a run."""
    run = folder / f"{name.replace(' ', '-')}-{seed}"
    if not (run / "losses.json").exists():
        command = [sys.executable, "-m", "fsdpctl", "train", *MODEL, *RUN, *WAYS[name]]
        command += [f"train.steps={steps}", f"train.seed={seed}", f"train.run_dir={run}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if "loss" in line][-LAST:]
        (validation,) = (line["val_loss"] for line in lines if "val_loss" in line)
        (run / "losses.json").write_text(json.dumps([statistics.mean(losses), validation]))
    trained, validated = json.loads((run / "losses.json").read_text())
    print(f"{name}, seed {seed}: train {trained:.4f}, validation {validated:.4f}", flush=True)
    return trained, validated


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--runs", type=Path, help="directory of the runs; kept for the next call")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (given.runs or Path(scratch)).absolute()
        losses = {
            (name, seed): train(name, seed, given.steps, folder)
            for seed in range(given.seeds)
            for name in WAYS
        }
    seconds, sizes = time_steps(given.width, given.rounds)
    results = []
    for name in WAYS:
        ratios = [a / b for a, b in zip(seconds[name], seconds[BASELINE], strict=True)]
        by_seed = [losses[name, seed] for seed in range(given.seeds)]
        trained, validated = map(list, zip(*by_seed, strict=True))
        median, ratio = statistics.median(seconds[name]), statistics.median(ratios)
        results.append(Way(name, *sizes[name], median, round(ratio, 3), trained, validated))
        print(results[-1], flush=True)
    about = {"width": given.width, "rounds": given.rounds, "steps": given.steps}
    write_report(given.out, "little_memory", [asdict(each) for each in results], **about)


if __name__ == "__main__":
    main()
