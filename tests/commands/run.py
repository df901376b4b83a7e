"""Runs `fsdpctl` as a process, as a user does."""

import json
import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from fsdpctl.commands.app import app
from fsdpctl.errors import FsdpctlError

TINY = [
    "model.num_layers=2", "model.hidden_size=32", "model.intermediate_size=48",
    "model.num_heads=4", "model.num_kv_heads=2", "train.seq_len=16", "train.global_batch_size=8",
    "train.eval_every=20", "train.sample_tokens=0", "checkpoint.every=25", "data=text",
]  # fmt: skip


def invoke(*args: str) -> tuple[int, str]:
    """Run a command in this process; return its exit code, and its output or its error."""
    result = CliRunner().invoke(app, list(args))
    if isinstance(result.exception, FsdpctlError):
        return result.exception.exit_code, str(result.exception)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "fsdpctl", *args]


def fsdpctl(*args: str, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with standard output and error as text."""
    return subprocess.run(
        command(*args), cwd=cwd, capture_output=True, text=True, timeout=timeout, env=environment()
    )


def environment() -> dict[str, str]:
    paths = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).parent.parent.parent)]
    path = os.pathsep.join(filter(None, paths))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def make_text(folder: Path) -> Path:
    """Write a text file that is long enough for a short run."""
    file = folder / "words.txt"
    file.write_text("".join(f"line {n} is {n * n % 97} and {n % 7}\n" for n in range(900)))
    return file


def run_args(folder: Path, steps: int, *more: str) -> list[str]:
    """Return the settings of a short run; the last of several with one name counts."""
    settings = [
        *TINY,
        f"data.path={make_text(folder)}",
        "train.run_dir=run",
        f"train.steps={steps}",
    ]
    last = dict(arg.split("=", 1) for arg in (*settings, *more))
    return [f"{name}={value}" for name, value in last.items()]


def figures(run_dir: Path) -> list[tuple[int, float | None, float | None]]:
    """Return step, loss and validation loss of every line that has a loss."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    results = [(line["step"], line.get("loss"), line.get("val_loss")) for line in lines]
    return [each for each in results if each[1:] != (None, None)]
