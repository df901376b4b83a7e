"""All measurements on one GPU, in two halves of less than five minutes.

    python -m benchmarks.gpu_session --half 1
    python -m benchmarks.gpu_session --half 2

Each part has separate processes and a time limit. If a part fails or exceeds its limit, the others
still run, and the exit code is 1. After each part, its output is printed and gpu-session.json is
written. `--small` runs the same parts with sizes that take no time.
"""

import argparse
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
_TOO_LATE = 124  # the exit code of timeout(1)
_PATIENCE = 300  # seconds, the limit of a small part
_TAIL = 12  # last lines of a part's output in the report
# Packages that pyproject.toml does not name: omegaconf requires the second, which has no wheel.
_BESIDES = ("pytest", "antlr4-python3-runtime==4.9.3")


Command = tuple[str, ...]  # a module and its arguments


@dataclass(frozen=True, slots=True)
class Part:
    """A question, and the commands that answer it one after another."""

    name: str
    commands: tuple[Command, ...]
    seconds: int  # limit for all commands
    environment: dict[str, str] = field(default_factory=dict)


def halves(scratch: Path, *, small: bool) -> tuple[list[Part], list[Part]]:
    """Return the parts of both halves, most important first.

    A part writes its results as JSON files into `scratch`.
    """

    def out(name: str) -> tuple[str, str]:
        return "--out", str(scratch / f"{name}.json")

    def sized(small_command: str, command: str) -> Command:
        return tuple((small_command if small else command).split())

    train = ("fsdpctl", "train", f"train.run_dir={scratch / 'run'}", "launch.device=cuda")
    alone = ("launch.nproc_per_node=1", "train.eval_every=0", "train.sample_tokens=0")
    tiny = "model.num_layers=1 train.seq_len=16 train.global_batch_size=2 data.val_fraction=0"
    model = sized(tiny, "")
    steps = sized("train.steps=2 train.steps=4", "train.steps=100 train.steps=200")
    resumed = tuple((*train, *alone, *model, upto) for upto in steps)
    gpu = ("benchmarks.gpu", *sized("--rounds 1", "--rounds 8"), "--sizes")
    speed = (*gpu, *sized("tiny", "364M,1.4B"), "--modes")
    largest = (*gpu, *sized("tiny8B", "8B"), *out("gpu-largest"))
    few = sized("--models llama_tiny --lengths 16 --smallest 0 --count 2", "")
    memory = ("benchmarks.gpu_memory", *few, *out("gpu-memory"))
    asleep = ("--device", "cuda", "--blocks", "4", "--world-sizes", "8")
    rounds = sized("--rounds 1", "--rounds 30")
    host = ("benchmarks.host_time", *asleep, *rounds, *out("gpu-host-time"))
    sizes = sized("--small", "")
    compiled = ("benchmarks.gpu_compiled", *sizes, *out("gpu-compiled"))
    engine, others = _tests(small=small)
    sanitized = {"TORCH_CUDA_SANITIZER": "1"}
    first = [
        Part("tests of the engine", (engine,), 35),
        Part("tests with the stream sanitizer", (engine,), 45, sanitized),
        Part("a run and its resume", resumed, 45),
        Part("other tests", (others,), 60),
        Part("speed, 8 fake ranks", ((*speed, "fake8", *out("gpu-fake8")),), 75),
    ]
    second = [
        Part("memory", (memory,), 90),
        Part("speed, NCCL", ((*speed, "nccl1", *out("gpu-nccl1")),), 45),
        Part("the largest model", (largest,), 40),
        Part("attention", (("benchmarks.gpu_attention", *sizes, *out("gpu-attention")),), 20),
        Part("host time", (host,), 20),
        # This part gets the rest of the five minutes.
        Part("compiled, fused, collected", (compiled,), 60),
    ]
    return first, second


def _tests(*, small: bool) -> tuple[Command, Command]:
    """Return the commands for the engine's tests that need a device, and for all others."""
    engine = "tests/engine/test_cuda.py"
    files = (str(each.relative_to(ROOT)) for each in sorted((ROOT / "tests").rglob("test_*.py")))
    others = [
        each
        for each in files
        if each != engine and "pytest.mark.cuda" in (ROOT / each).read_text(encoding="utf-8")
    ]
    # tests/conftest.py needs packages for tests alone; a warning must not end a test.
    calm = ("-q", "--noconftest", "-p", "no:cacheprovider", "-W", "default")
    command = ("pytest", *calm, "--continue-on-collection-errors", "-m", "cuda and not slow")
    few = ("-k", "unsharded or snapshot") if small else ()
    return (*command, *few, engine), (*command, *few, *others)


def missing() -> Iterator[str]:
    """Yield a line for each package that is required and not installed, and for a missing GPU."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lacking = False
    for requirement in (*project["dependencies"], *_BESIDES):
        name = re.split(r"[<>=\[]", requirement)[0]
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            lacking = True
            yield f"{name}: not installed; run: {sys.executable} -m pip install '{requirement}'"
    if lacking:
        return
    try:
        importlib.import_module("fsdpctl.commands.app")
    except ImportError as error:
        yield f"fsdpctl: import failed: {error}"
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        yield f"torch {torch.__version__}: no CUDA device available; expected a GPU"


def answer(part: Part) -> dict[str, object]:
    """Run a part; return its exit code, seconds and last lines of output."""
    began, code = time.monotonic(), 0
    with tempfile.TemporaryFile("w+", errors="replace") as message:
        for command in part.commands:
            left = part.seconds - (time.monotonic() - began)
            # A file, not a pipe: a process that survives its group would keep a pipe open.
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdout=message,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**_environment(), **part.environment},
                start_new_session=True,
            )
            try:
                code = process.wait(timeout=max(1.0, left))
            except subprocess.TimeoutExpired:
                code = _TOO_LATE
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
                    process.wait()
            if code:
                break
        message.seek(0)
        lines = message.read().splitlines()[-_TAIL:]
    seconds = round(time.monotonic() - began, 1)
    return {"part": part.name, "code": code, "seconds": seconds, "last_lines": lines}


def _environment() -> dict[str, str]:
    """Return the environment in which ranks import this checkout, although it is not installed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run(parts: list[Part], scratch: Path, out: Path) -> list[str]:
    """Run parts and merge their answers into `out`; return the names of parts that failed."""
    import torch

    from benchmarks.report import write_report

    file = out / "gpu-session.json"
    known = json.loads(file.read_text())["results"] if file.exists() else []
    answers = {each["part"]: each for each in known}
    out.mkdir(parents=True, exist_ok=True)
    for part in parts:
        result = answer(part)
        for each in scratch.glob("*.json"):
            shutil.move(each, out / each.name)
        answers[part.name] = result
        print(json.dumps(result, indent=2), flush=True)
        chip = torch.cuda.get_device_name()
        write_report(file, "gpu_session", list(answers.values()), device=chip)
    return [part.name for part in parts if answers[part.name]["code"]]


def main() -> None:
    """Run both halves, one of them, or single parts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--half", type=int, choices=[1, 2], help="default: both")
    parser.add_argument("--small", action="store_true", help="sizes that take no time")
    parser.add_argument("--only", default="", help="text in the names of the parts to run")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    lines = list(missing())
    if lines:
        print(*lines, sep="\n", file=sys.stderr)
        raise SystemExit(2)
    with tempfile.TemporaryDirectory() as folder:
        first, second = halves(Path(folder), small=options.small)
        chosen = {1: first, 2: second}.get(options.half, [*first, *second])
        chosen = [each for each in chosen if options.only in each.name]
        if options.small:  # an emulated device has no time to be measured
            chosen = [replace(each, seconds=_PATIENCE) for each in chosen]
        failed = run(chosen, Path(folder), options.out)
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
