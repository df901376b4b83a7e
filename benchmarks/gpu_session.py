"""All that a GPU is asked, in the order in which ten minutes of it answer most.

    python -m benchmarks.gpu_session --out benchmarks/results

Each part is a process of its own with a limit of time, and writes its figures at once. One that
fails or takes too long is noted in gpu-session.json, and the others go on. What is installed
serves: torch 2.11 or newer, and what pyproject.toml names.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.report import write_report

_TOO_LATE = 124  # as timeout(1) says it
_TAIL = 12  # lines of a part's output that are kept


@dataclass(frozen=True, slots=True)
class Part:
    """A question, as commands that follow one another."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    seconds: int  # for all of them
    environment: dict[str, str] = field(default_factory=dict)


def parts(device: str, out: Path, runs: Path) -> list[Part]:
    """In their order. On the CPU fewer and small ones, to see that this runs."""
    on = ("--device", device)
    train = ("fsdpctl", "train", f"train.run_dir={runs / 'run'}", f"launch.device={device}")
    small = ("launch.nproc_per_node=1", "train.eval_every=0", "train.sample_tokens=0")
    memory = ("benchmarks.gpu_memory", *on, "--out", str(out / "gpu-memory.json"))
    speed = ("benchmarks.gpu", *on, "--modes", "fake8", "--out", str(out / "gpu.json"))
    if device == "cpu":
        return [
            Part("a run", ((*train, *small, "train.steps=2"),), 60),
            Part("memory", ((*memory, "--models", "llama_tiny", "--count", "1"),), 60),
            Part("speed", ((*speed, "--sizes", "tiny", "--rounds", "1"),), 60),
        ]
    tests = ("pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", "tests/engine/test_cuda.py")
    room = int(0.9 * torch.cuda.get_device_properties(0).total_memory / 2**30)
    largest = (
        "benchmarks.gpu",
        "--sizes",
        "8B",
        "--rounds",
        "8",
        "--out",
        str(out / "gpu-8b.json"),
    )
    resumed = tuple((*train, *small, f"train.steps={steps}") for steps in (100, 200))
    return [
        Part("tests", (tests,), 60),
        Part("tests with the stream sanitizer", (tests,), 60, {"TORCH_CUDA_SANITIZER": "1"}),
        Part("a run and its resume", resumed, 60),
        Part("memory", ((*memory, "--gib", str(room), "--count", "24"),), 180),
        Part("speed", ((*speed, "--sizes", "364M,1.4B", "--rounds", "8"),), 150),
        Part("the largest model", (largest,), 90),
    ]


def answer(part: Part) -> dict[str, object]:
    """Run a part; what it said last, how it ended and how long it took."""
    began, said, code = time.monotonic(), "", 0
    for command in part.commands:
        left = part.seconds - (time.monotonic() - began)
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **part.environment},
            start_new_session=True,
        )
        try:
            said += process.communicate(timeout=max(1.0, left))[0]
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
            said += process.communicate()[0]
            code = _TOO_LATE
        if code:
            break
    seconds = round(time.monotonic() - began, 1)
    lines = said.splitlines()[-_TAIL:]
    return {"part": part.name, "code": code, "seconds": seconds, "last_lines": lines}


def main() -> None:
    """Ask everything, or the parts that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--only", help="parts whose names have this in them")
    words = parser.parse_args()
    chip = torch.cuda.get_device_name() if words.device == "cuda" else "cpu"
    answers: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as runs:
        for part in parts(words.device, words.out, Path(runs)):
            if words.only and words.only not in part.name:
                continue
            found = answer(part)
            answers.append(found)
            print(json.dumps(found, indent=2), flush=True)
            write_report(words.out / "gpu-session.json", "gpu_session", answers, device=chip)


if __name__ == "__main__":
    main()
