"""What a checkpoint costs training: saved at once, and in the background, in turns.

    python -m benchmarks.saving --out benchmarks/results/saving.json

Runs of `fsdpctl train` that save every few steps, beside runs that save only at the end. The stall
is what the run's metrics say that training stood still for each checkpoint; the cost is by how much
the steps between two saves became longer, the stall included.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import write_report

STEPS, EVERY = 24, 6
_MODEL = ["model.num_layers=8", "model.hidden_size=512", "model.intermediate_size=1408",
          "model.num_heads=8", "model.num_kv_heads=8", "model.vocab_size=8192"]  # fmt: skip
_RUN = ["train.seq_len=64", "train.global_batch_size=2", f"train.steps={STEPS}",
        "train.eval_every=0", "train.sample_tokens=0", "data.val_fraction=0"]  # fmt: skip
VARIANTS = {
    "none": ["checkpoint.every=0"],
    "sync": [f"checkpoint.every={EVERY}", "checkpoint.mode=sync"],
    "async": [f"checkpoint.every={EVERY}", "checkpoint.mode=async"],
}


def run(name: str, folder: Path) -> dict[str, float]:
    """One run: seconds of steps and stalls."""
    run_dir = folder / name
    words = [*_MODEL, *_RUN, *VARIANTS[name], f"train.run_dir={run_dir}"]
    command = [sys.executable, "-m", "fsdpctl", "train", "--resume", "never", *words]
    subprocess.run(command, check=True, capture_output=True)
    newest = max(folder.glob(f"{name}*"), key=lambda each: each.stat().st_mtime)
    lines = [json.loads(line) for line in (newest / "metrics.jsonl").read_text().splitlines()]
    steps = [each["seconds"] for each in lines if "loss" in each and each["step"] > EVERY]
    stalls = [
        (each["checkpoint_seconds"], each["checkpoint_write_seconds"])
        for each in lines
        if "checkpoint_seconds" in each and EVERY < each["step"] < STEPS
    ]
    size = sum(file.stat().st_size for file in (newest / "checkpoints" / "latest").iterdir())
    return {
        "step_seconds": statistics.mean(steps),
        "stall_seconds": statistics.mean(stall for stall, _ in stalls) if stalls else 0.0,
        "write_seconds": statistics.mean(write for _, write in stalls) if stalls else 0.0,
        "checkpoint_bytes": size,
    }


def summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians over the rounds."""

    def median(name: str, key: str) -> float:
        return statistics.median(each[name][key] for each in rounds)

    plain = median("none", "step_seconds")
    found: dict[str, Any] = {"checkpoint_bytes": rounds[0]["sync"]["checkpoint_bytes"]}
    for name in ("sync", "async"):
        stall, step = median(name, "stall_seconds"), median(name, "step_seconds")
        found[name] = {
            "stall_over_step": round(stall / plain, 3),
            "write_over_step": round(median(name, "write_seconds") / plain, 3),
            "cost_over_step": round(stall / plain + EVERY * (step / plain - 1), 3),
        }
    return found


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rounds = [{name: run(name, Path(folder)) for name in VARIANTS} for _ in range(given.rounds)]
    result = summary(rounds)
    print(result, flush=True)
    about = {"rounds": given.rounds, "ranks": 2, "steps_between_saves": EVERY}
    write_report(given.out, "saving", result, **about)


if __name__ == "__main__":
    main()
