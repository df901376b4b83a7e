"""The processor time of a start: `python -m benchmarks.startup [--out FILE.json]`.

The report has medians of alternating processes: `fsdpctl --help` and `import typer`; the estimate
of a model of 405 billion parameters on 16,384 ranks and `import torch`; the errors for a wrong key
and a wrong path; and `train` until its first line. Other processes change processor time less than
elapsed time. Bytecode is on disk, as after an installation.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.report import arguments, write_report

ROOT = Path(__file__).parent.parent
LARGE = (
    "estimate-memory", "model=llama3_405b", "launch.nproc_per_node=8", "launch.nnodes=2048",
    "cluster=h100",
)  # fmt: skip
FIRST_LINE = "train_first_line"
TIMED = {
    "typer": ("-c", "import typer"),
    "help": ("-m", "fsdpctl", "--help"),
    "torch": ("-c", "import torch"),
    "estimate_405b": ("-m", "fsdpctl", *LARGE),
    "wrong_key": ("-m", "fsdpctl", "train", "train.stepz=3"),
    "wrong_path": ("-m", "fsdpctl", "train", "data.path=none.txt"),
    FIRST_LINE: ("-u", "-m", "fsdpctl", "train", "--dry-run"),
}


def seconds(name: str, compiled: str) -> float:
    """Return the processor time of a command; `compiled` is a directory for its bytecode.

    The process ends when it has printed the first line, if that is measured.
    """
    env = {**os.environ, "PYTHONPYCACHEPREFIX": compiled, "PYTHONDONTWRITEBYTECODE": ""}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(
        [sys.executable, *TIMED[name]], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT,
        env={**env, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    if name == FIRST_LINE:
        process.stdout.readline()
        process.kill()
    process.communicate()
    if process.returncode not in (-9 if name == FIRST_LINE else 0, 2 if "wrong" in name else 0):
        raise SystemExit(f"{name}: exit code {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def medians(rounds: int) -> dict[str, float]:
    """Return the median time of each command; they take turns."""
    with TemporaryDirectory() as compiled:
        for name in TIMED:
            seconds(name, compiled)
        turns = [{name: seconds(name, compiled) for name in TIMED} for _ in range(rounds)]
    return {name: round(median(turn[name] for turn in turns), 3) for name in TIMED}


def main() -> None:
    """Time the commands, and write the report."""
    options = arguments(rounds=7)
    actual = medians(options.rounds)
    result = {
        "processor_seconds": actual,
        "help_over_import_typer": round(actual["help"] / actual["typer"], 2),
        "estimate_over_import_torch": round(actual["estimate_405b"] / actual["torch"], 2),
    }
    print(result)
    write_report(options.out, "startup", [result], rounds=options.rounds)


if __name__ == "__main__":
    main()
