"""What huge pages do for CPU ranks: `python -m benchmarks.huge_pages [--out FILE.json]`.

Runs of two models, with the allocator's setting of the launcher and with torch's default, take
turns. One model has a small vocabulary, the other 50,000 tokens, whose logits the allocator maps
and unmaps in every step. Memory is the largest resident size of the ranks.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from benchmarks.growth import ranks_of
from benchmarks.predicted_steps import ALWAYS, MODELS
from benchmarks.report import write_report
from tests.cli.run import environment, make_text

FIRST, STEPS = 4, 24  # earlier steps warm up
RUNS = {"llama": MODELS["llama"], "gpt2": MODELS["gpt2"]}


class Run(NamedTuple):
    """A run's time and memory."""

    seconds: float  # median of its steps
    resident: int  # bytes


def run(model: str, *, huge: bool) -> Run:
    """Train one model."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [*ALWAYS.split(), *RUNS[model].split(), f"train.steps={STEPS}",
                 "train.global_batch_size=8", "launch.nproc_per_node=2",
                 f"data.path={make_text(folder)}", f"train.run_dir={folder / 'run'}"]  # fmt: skip
        env = {**environment(), "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            [sys.executable, "-m", "fsdpctl", "train", *words], cwd=folder,
            env=env if huge else {**env, "THP_MEM_ALLOC_ENABLE": "0"}, stdout=subprocess.DEVNULL,
        ) as launcher:  # fmt: skip
            resident = _watched(launcher)
        assert launcher.returncode == 0
        lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
        seconds = [line["seconds"] for line in lines if line.get("loss") and line["step"] > FIRST]
    return Run(median(seconds), resident)


def _watched(launcher: subprocess.Popen[bytes]) -> int:
    """Return the largest resident size of a rank until the launcher ends."""
    most = 0
    while launcher.poll() is None:
        with contextlib.suppress(psutil.Error):  # a process that has just ended
            most = max([most, *(each.memory_info().rss for each in ranks_of(launcher.pid))])
        time.sleep(0.05)
    return most


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for model in RUNS:
        found: dict[bool, list[Run]] = {True: [], False: []}
        for number in range(args.rounds):
            for huge in (True, False) if number % 2 else (False, True):
                found[huge].append(run(model, huge=huge))
        seconds = {huge: median(each.seconds for each in of) for huge, of in found.items()}
        resident = {huge: median(each.resident for each in of) for huge, of in found.items()}
        results.append(
            {
                "model": model,
                "time_over_defaults": round(seconds[True] / seconds[False], 4),
                "memory_over_defaults": round(resident[True] / resident[False], 4),
            }
        )
        print(json.dumps(results[-1]), flush=True)
    write_report(args.out, "huge_pages", results, rounds=args.rounds)


if __name__ == "__main__":
    main()
