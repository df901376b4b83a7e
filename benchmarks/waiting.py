"""Steps of a CPU process with two threads, by how OpenMP's threads wait for one another.

    python -m benchmarks.waiting --out benchmarks/results/waiting.json

The ways alternate, first on the idle machine, then beside a busy process per core. All runs must
have equal losses.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.report import arguments, write_report
from fsdpctl.io.resources import num_cores

PASSIVE = "passive"
WAYS = {  # variables of libgomp
    PASSIVE: {"OMP_WAIT_POLICY": "PASSIVE"},  # the default of fsdpctl
    "short spin": {"GOMP_SPINCOUNT": "1000"},
    "long spin": {"GOMP_SPINCOUNT": "300000"},  # the default of libgomp, about 3 ms
}
THREADS, WARMUP = 2, 5  # steps that don't count
RUN = [
    "launch.device=cpu", "launch.nproc_per_node=1", "train.sample_tokens=0", "checkpoint.every=0",
    "train.eval_every=0", "train.final_eval_batches=1",
]  # fmt: skip


@contextmanager
def load(count: int) -> Iterator[None]:
    """Keep `count` cores busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def train(way: str, steps: int) -> tuple[float, list[float]]:
    """Return the median seconds per step, and the losses."""
    waits = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    env = {key: text for key, text in os.environ.items() if key not in waits} | WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fsdpctl", "-q", "train", *RUN]
        command += [f"train.steps={steps}", f"train.run_dir={folder}/run"]
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL,
            env={**env, "OMP_NUM_THREADS": str(THREADS)},
        )  # fmt: skip
        text = (Path(folder) / "run" / "metrics.jsonl").read_text()
    lines = [line for line in map(json.loads, text.splitlines()) if "loss" in line]
    return median(line["seconds"] for line in lines[WARMUP:]), [line["loss"] for line in lines]


def main() -> None:
    """Measure, print and write."""
    options = arguments(ways=WAYS, rounds=5, steps=30)
    results, losses = [], set()
    for beside in (0, num_cores()):
        seconds: dict[str, list[float]] = {way: [] for way in options.ways}
        with load(beside):
            for way in list(options.ways) * options.rounds:
                result, of_run = train(way, options.steps)
                seconds[way].append(result)
                losses.add(tuple(of_run))
        for way, found_of_way in seconds.items():
            ratios = [a / b for a, b in zip(found_of_way, seconds[PASSIVE], strict=True)]
            row = {"busy_processes": beside, "way": way, "step_seconds": found_of_way}
            results.append({**row, "over_passive": round(median(ratios), 3)})
            print(results[-1], flush=True)
    if len(losses) > 1:
        raise SystemExit("the losses differ")
    write_report(options.out, "waiting", results, threads=THREADS, steps=options.steps)


if __name__ == "__main__":
    main()
