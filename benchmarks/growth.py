"""The memory of a long run over its steps: `python -m benchmarks.growth [--out FILE.json]`.

Two CPU ranks train the default model, while their resident bytes are sampled. A figure is the
median over the 100 steps after its step, because the heap is trimmed only every 20 steps, and
validation and checkpoints take memory for a moment. Pages of mapped files, such as the token file,
are counted separately: the system may drop them.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.report import arguments, write_report
from fsdpctl.run.metrics import last_step
from tests.commands.run import environment

RANKS, SEQ_LEN = 2, 64
FIRST, EVERY, WINDOW = 200, 1000, 100  # steps
PATIENCE = 900.0  # seconds without a step; the first step also opens the data


# A step, each rank's private bytes, and its bytes of mapped files.
Read = tuple[int, list[int], list[int]]


def reads(folder: Path, steps: int, batch: int, *more: str) -> Iterator[Read]:
    """Train `steps` steps with `more` settings; yield the memory of ranks a few times per second.

    The caches of the run are in `folder`.
    """
    run = folder / "run"
    settings = [
        f"train.steps={steps}", f"train.seq_len={SEQ_LEN}", f"launch.nproc_per_node={RANKS}",
        f"train.run_dir={run}", "launch.device=cpu", "train.sample_tokens=0",
        f"train.global_batch_size={batch}", *more,
    ]  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", "fsdpctl", "train", *settings], cwd=folder,
        env={**environment(), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder)},
        stdout=subprocess.DEVNULL,
    ) as launcher:  # fmt: skip
        ranks: list[psutil.Process] = []
        seen, since = 0, time.monotonic()
        while launcher.poll() is None:
            step = last_step(run / "metrics.jsonl")
            if step and not ranks:
                children = psutil.Process(launcher.pid).children(recursive=True)
                ranks = [each for each in children if "fsdpctl.training.worker" in each.cmdline()]
            try:
                results = [each.memory_info() for each in ranks]
            except psutil.NoSuchProcess:
                break  # the end of the run
            if step > seen:
                seen, since = step, time.monotonic()
                shared = [each.shared for each in results]
                yield step, [each.rss - each.shared for each in results], shared
            assert time.monotonic() < since + PATIENCE, f"no step after {step}"
            time.sleep(0.2)
    assert launcher.returncode == 0, launcher.returncode


def resident_after(result: list[Read], step: int) -> dict[str, list[int]]:
    """Return the medians of each rank over the steps from `step` on."""
    within = [each[1:] for each in result if step <= each[0] < step + WINDOW]
    sizes, mapped = (
        [int(median(of)) for of in zip(*x, strict=True)] for x in zip(*within, strict=True)
    )
    return {"own_bytes": sizes, "mapped_bytes": mapped}


def main() -> None:
    """Measure, print and write."""
    options = arguments(steps=5000, batch=16)  # samples per step
    with tempfile.TemporaryDirectory() as folder:
        result = list(reads(Path(folder), options.steps + WINDOW, options.batch))
    results: list[dict[str, Any]] = []
    for step in (FIRST, *range(EVERY, options.steps + 1, EVERY)):
        row: dict[str, Any] = {"step": step, **resident_after(result, step)}
        first = results[0]["own_bytes"] if results else row["own_bytes"]
        ratios = [now / then for now, then in zip(row["own_bytes"], first, strict=True)]
        results.append({**row, "over_first": round(max(ratios), 4)})
    print(*results, sep="\n")
    kwargs = {"world_size": RANKS, "model": "llama_tiny", "seq_len": SEQ_LEN}
    kwargs |= {"global_batch_size": options.batch, "window": WINDOW}
    write_report(options.out, "growth", results, **kwargs)


if __name__ == "__main__":
    main()
