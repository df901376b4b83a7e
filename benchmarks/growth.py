"""The memory of a long run over its steps: `python -m benchmarks.growth [--out FILE.json]`.

Two CPU ranks train the default model. Their resident bytes are read from the system all the time: a
figure is the median over the 100 steps that follow its step, because the heap is trimmed every 20
steps only, and validation and checkpoints pass. Pages of mapped files, such as the token file, are
counted separately: the system may drop them.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

from benchmarks.report import write_report
from fsdpctl.run.metrics import last_step
from tests.cli.run import environment

RANKS, SEQ_LEN, BATCH = 2, 64, 16
WINDOW = 100  # steps
FIRST, EVERY, STEPS = 200, 1000, 5000
PATIENCE = 120.0  # seconds without a step


class Read(NamedTuple):
    """The resident bytes of each rank after a step: its own, and those of mapped files."""

    step: int
    own: tuple[int, ...]
    mapped: tuple[int, ...]


def reads(folder: Path, steps: int, batch: int) -> Iterator[Read]:
    """Train `steps` steps, and yield what the ranks hold a few times per second."""
    run = folder / "run"
    settings = [
        f"train.steps={steps}", f"train.seq_len={SEQ_LEN}", f"launch.nproc_per_node={RANKS}",
        f"train.run_dir={run}", "launch.device=cpu", "train.sample_tokens=0",
        f"train.global_batch_size={batch}",
    ]  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", "fsdpctl", "train", *settings], cwd=folder,
        env={**environment(), "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
    ) as launcher:  # fmt: skip
        ranks: list[psutil.Process] = []
        seen, since = 0, time.monotonic()
        while launcher.poll() is None:
            step = last_step(run / "metrics.jsonl")
            ranks = ranks or (ranks_of(launcher.pid) if step else [])
            try:
                found = [each.memory_info() for each in ranks]
            except psutil.NoSuchProcess:
                break  # the end of the run
            if step > seen:
                seen, since = step, time.monotonic()
                own = tuple(each.rss - each.shared for each in found)
                yield Read(step, own, tuple(each.shared for each in found))
            assert time.monotonic() < since + PATIENCE, f"no step after {step}"
            time.sleep(0.2)
    assert launcher.returncode == 0, launcher.returncode


def ranks_of(launcher: int) -> list[psutil.Process]:
    """Return the processes that train."""
    children = psutil.Process(launcher).children(recursive=True)
    return [each for each in children if "fsdpctl.train.worker" in each.cmdline()]


def resident_after(found: list[Read], step: int) -> dict[str, list[int]]:
    """Return each rank's medians over the steps that follow."""
    within = [each for each in found if step <= each.step < step + WINDOW]
    both = {"own": [x.own for x in within], "mapped": [x.mapped for x in within]}
    return {
        f"{kind}_bytes": [int(median(each)) for each in zip(*rows, strict=True)]
        for kind, rows in both.items()
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--batch", type=int, default=BATCH, help="samples per step")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = list(reads(Path(folder), args.steps + WINDOW, args.batch))
    marks = [FIRST, *range(EVERY, args.steps + 1, EVERY)]
    resident = {step: resident_after(found, step) for step in marks}
    first = resident[FIRST]["own_bytes"]
    results = [
        {
            "step": step,
            **each,
            "over_first": round(
                max(now / then for now, then in zip(each["own_bytes"], first, strict=True)), 4
            ),
        }
        for step, each in resident.items()
    ]
    print(*results, sep="\n")
    about = {
        "world_size": RANKS,
        "model": "llama_tiny",
        "seq_len": SEQ_LEN,
        "global_batch_size": args.batch,
        "window": WINDOW,
    }
    write_report(args.out, "growth", results, **about)


if __name__ == "__main__":
    main()
