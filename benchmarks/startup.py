"""The size of a start: files, calls and seconds of the command before its first step.

    python -m benchmarks.startup --out benchmarks/results/startup.json

Counts the package's files of which a function runs in the launcher for `train strategy=auto
--dry-run`, and the calls of what should run once. Then times `fsdpctl --help` against an empty
Typer program, and the estimate of a model of 405 billion parameters on 16,384 ranks: medians.
"""

import argparse
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from inspect import CO_OPTIMIZED
from pathlib import Path
from statistics import median
from types import FrameType

from benchmarks.report import write_report

ROOT = Path(__file__).parent.parent
PACKAGE = str(ROOT / "fsdpctl")
ONCE = ("open_data", "choose", "trace", "open_run", "look", "settle", "build_model")
DRY_RUN = ("train", "strategy=auto", "--dry-run", "data=text")
LARGE = (
    "estimate-memory", "model=llama3_405b", "cluster=h100", "launch.nnodes=2048",
    "launch.nproc_per_node=8", "train.global_batch_size=16384",
)  # fmt: skip
EMPTY = "import typer; app = typer.Typer(); app.command()(lambda: None); app(['--help'])"


def counted(run: Callable[[], object]) -> tuple[set[str], Counter[str]]:
    """Call `run`; return the package's files that it runs functions of, and calls by name."""
    files: set[str] = set()
    calls: Counter[str] = Counter()

    def see(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code  # of a function if CO_OPTIMIZED is set, else of a class or a module
        if event == "call" and code.co_filename.startswith(PACKAGE):
            if code.co_flags & CO_OPTIMIZED:
                files.add(code.co_filename)
            calls[code.co_name] += 1

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return files, calls


def dry_run() -> None:
    """Run the command in this process."""
    from typer.testing import CliRunner

    from fsdpctl.cli.app import app

    result = CliRunner().invoke(app, [*DRY_RUN, f"data.path={ROOT / 'CHANGELOG.md'}"])
    if result.exit_code:
        raise SystemExit(result.output)


def seconds(command: list[str]) -> float:
    """Return the wall time of a process."""
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return time.perf_counter() - began


def main() -> None:
    """Count, time, and write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    files, calls = counted(dry_run)
    fsdpctl = [sys.executable, "-m", "fsdpctl"]
    timed: dict[str, list[float]] = {"empty": [], "help": [], "estimate_405b": []}
    for _ in range(words.rounds):
        timed["empty"].append(seconds([sys.executable, "-c", EMPTY]))
        timed["help"].append(seconds([*fsdpctl, "--help"]))
        timed["estimate_405b"].append(seconds([*fsdpctl, *LARGE]))
    found = {name: round(median(each), 3) for name, each in timed.items()}
    result = {
        "files": len(files),
        "calls": {name: calls[name] for name in ONCE},
        "seconds": found,
        "help_over_empty": round(found["help"] / found["empty"], 2),
    }
    print(result)
    if words.out:
        write_report(words.out, "startup", [result])


if __name__ == "__main__":
    main()
