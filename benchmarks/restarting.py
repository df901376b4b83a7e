"""What a restart takes beside a start: `python -m benchmarks.restarting [--out FILE.json]`.

A run with two ranks is started, and one of them killed once it trains. A start is the time from the
command to its first step, a restart that from the failure to the next step, as the run's own
metrics say it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import write_report
from fsdpctl.run.metrics import last_step
from fsdpctl.train.requests import STOP
from tests.cli.run import TINY, environment, make_text

RANKS, ROUNDS, KILLED_AFTER = 2, 5, 30
PATIENCE = 180.0  # seconds


def one_round(folder: Path) -> dict[str, float]:
    """Seconds of a start and of a restart, and the steps that it cost."""
    folder.mkdir()
    run = folder / "run"
    words = [
        *TINY, f"data.path={make_text(folder)}", f"train.run_dir={run}", "train.steps=100000",
        f"launch.nproc_per_node={RANKS}", "launch.max_restarts=1",
    ]  # fmt: skip
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "fsdpctl", "train", *words], cwd=folder, env=environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as launcher:  # fmt: skip
        until_step(run, 1)
        start = time.monotonic() - began
        until_step(run, KILLED_AFTER)
        ranks = [
            each
            for each in psutil.Process(launcher.pid).children(recursive=True)
            if "fsdpctl.train.worker" in each.cmdline()
        ]
        ranks[-1].kill()
        restart = until_restarted(run)
        (run / STOP).touch()
        launcher.wait(PATIENCE)
    restarted = restart["seconds_to_next_step"]
    return {"start": start, "restart": restarted, "steps_lost": restart["lost_steps"]}


def until_step(run: Path, step: int) -> None:
    """Wait until it is done."""
    deadline = time.monotonic() + PATIENCE
    while last_step(run / "metrics.jsonl") < step:
        assert time.monotonic() < deadline, f"{run}: no step {step}"
        time.sleep(0.01)


def until_restarted(run: Path) -> dict[str, Any]:
    """Wait until it trains again: what the run says of that."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for line in (run / "metrics.jsonl").read_text().splitlines():
            if (
                line.startswith("{")
                and line.endswith("}")
                and "restart" in (found := json.loads(line))
            ):
                return dict(found["restart"])
        time.sleep(0.1)
    raise AssertionError(f"{run}: did not train again")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as kept:
        rounds = [one_round(Path(kept) / str(number)) for number in range(args.rounds)]
    start, restart = (
        statistics.median(each[name] for each in rounds) for name in ("start", "restart")
    )
    results = {
        "start_seconds": round(start, 2),
        "restart_seconds": round(restart, 2),
        "restart_over_start": round(restart / start, 3),
        "largest_restart_over_start": round(
            max(each["restart"] / each["start"] for each in rounds), 3
        ),
        "most_steps_lost": max(each["steps_lost"] for each in rounds),
        "rounds": len(rounds),
    }
    print(results)
    write_report(args.out, "restarting", results, world_size=RANKS)


if __name__ == "__main__":
    main()
