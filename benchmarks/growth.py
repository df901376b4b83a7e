"""The memory of a long run over its steps: `python -m benchmarks.growth [--out FILE.json]`.

Two CPU ranks train the default model. Their resident bytes are read from the system all the time: a
figure is the median over the 100 steps that follow its step, because the heap is trimmed every 20
steps only, and validation and checkpoints pass. Pages of mapped files, such as the token file, are
counted separately: the system may drop them.
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
PATIENCE = 900.0  # seconds without a step; the first one waits until data is open


Read = tuple[int, list[int], list[int]]  # a step; each rank's own bytes, those of mapped files


def reads(folder: Path, steps: int, batch: int, *more: str) -> Iterator[Read]:
    """Train `steps` steps with `more` settings; yield what ranks hold a few times per second.

    What a run caches is in `folder`.
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
                found = [each.memory_info() for each in ranks]
            except psutil.NoSuchProcess:
                break  # the end of the run
            if step > seen:
                seen, since = step, time.monotonic()
                shared = [each.shared for each in found]
                yield step, [each.rss - each.shared for each in found], shared
            assert time.monotonic() < since + PATIENCE, f"no step after {step}"
            time.sleep(0.2)
    assert launcher.returncode == 0, launcher.returncode


def resident_after(found: list[Read], step: int) -> dict[str, list[int]]:
    """Return each rank's medians over the steps that follow."""
    within = [each[1:] for each in found if step <= each[0] < step + WINDOW]
    own, mapped = (
        [int(median(of)) for of in zip(*x, strict=True)] for x in zip(*within, strict=True)
    )
    return {"own_bytes": own, "mapped_bytes": mapped}


def main() -> None:
    """Measure, print and write."""
    words = arguments(steps=5000, batch=16)  # samples per step
    with tempfile.TemporaryDirectory() as folder:
        found = list(reads(Path(folder), words.steps + WINDOW, words.batch))
    results: list[dict[str, Any]] = []
    for step in (FIRST, *range(EVERY, words.steps + 1, EVERY)):
        row: dict[str, Any] = {"step": step, **resident_after(found, step)}
        first = results[0]["own_bytes"] if results else row["own_bytes"]
        ratios = [now / then for now, then in zip(row["own_bytes"], first, strict=True)]
        results.append({**row, "over_first": round(max(ratios), 4)})
    print(*results, sep="\n")
    about = {"world_size": RANKS, "model": "llama_tiny", "seq_len": SEQ_LEN}
    about |= {"global_batch_size": words.batch, "window": WINDOW}
    write_report(words.out, "growth", results, **about)


if __name__ == "__main__":
    main()
