"""The losses of training with compressed states, on the CPU.

    python -m benchmarks.little_memory --out benchmarks/results/little-memory.json

Runs with different seeds differ in the weights and in the order of the data. Each seed is trained
in every way. `update_time` measures the time of the updates.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import arguments, write_report

SPLIT_MASTERS = "precision.master_dtype=bfloat16+int8"
WAYS = {  # all compute in bf16
    "float32": [],
    "int8 moments": ["optimizer.state_dtype=int8"],
    "24-bit master weights": [SPLIT_MASTERS],
    "int8 moments, 24-bit master weights": ["optimizer.state_dtype=int8", SPLIT_MASTERS],
    # Loses small updates: shows that the comparison detects a loss.
    "bfloat16 master weights and moments": ["precision.master_dtype=bfloat16"],
}
BASELINE = "float32"
LAST = 25  # steps whose training loss counts
BF16 = ["precision=bf16"]
MODEL = ["launch.device=cpu", "launch.nproc_per_node=1", *BF16]
RUN = [
    "train.seq_len=64", "train.micro_batch_size=8", "train.global_batch_size=8",
    "train.eval_every=0", "train.final_eval_batches=200", "train.sample_tokens=0",
    "checkpoint.every=0",
]  # fmt: skip


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


def main() -> None:
    """Measure, print and write."""
    options = arguments(seeds=5, steps=1000)
    os.environ["OMP_NUM_THREADS"] = "1"
    results = []
    for name in WAYS:
        losses = [train(name, seed, options.steps) for seed in range(options.seeds)]
        trained, validated = map(list, zip(*losses, strict=True))
        results.append({"name": name, "train_losses": trained, "validation_losses": validated})
    write_report(options.out, "little_memory", results, steps=options.steps, last_steps=LAST)


if __name__ == "__main__":
    main()
