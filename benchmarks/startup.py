"""The size of a start: files, calls and seconds of the command before its first step.

    python -m benchmarks.startup --out benchmarks/results/startup.json

Counts the package's files of which a function runs in the launcher for `train strategy=auto
--dry-run`, the calls of what should run once, and the files between a line of chat and its loss.
Then measures the processor time, in turns, of `fsdpctl --help` and `import typer`, and of the
estimate of a model of 405 billion parameters on 16,384 ranks and `import torch`, and the answers to
a wrong key and a wrong path, and `train` until its first line: medians. Other processes change it
less than the time on a clock. Compiled modules are on disk, as after an installation.
"""

import argparse
import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from inspect import CO_OPTIMIZED
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import FrameType
from unittest import mock

from benchmarks.report import write_report

ROOT = Path(__file__).parent.parent
PACKAGE = str(ROOT / "fsdpctl")
ONCE = ("open_data", "choose", "trace", "open_run", "look", "settle", "build_model")
DRY_RUN = ("train", "strategy=auto", "--dry-run", "data=text")
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


def chat_files(folder: Path) -> dict[str, int]:
    """Count the files that run between a line of chat and its loss, without those of the model.

    Returns:
        The number in the process that trains, and in the process that renders the template.
    """
    import torch

    from fsdpctl.config.data import DataConfig
    from fsdpctl.data.batches import Batches
    from fsdpctl.data.chats.formats import Chat, parse_row
    from fsdpctl.data.chats.open import setup_of
    from fsdpctl.data.chats.template import open_template
    from fsdpctl.data.chats.workers import prepare
    from fsdpctl.data.open import open_data
    from fsdpctl.data.tokenizer import FileTokenizer, open_tokenizer
    from fsdpctl.plan.batch import plan_batches
    from fsdpctl.train.loss import summed_loss
    from tests.data.chats.families import say, write_lines, write_tokenizer

    line = {"messages": say("a question", "an answer")}
    tokenizer = write_tokenizer(folder / "tokenizer", "chatml")
    path = str(write_lines(folder / "chats.jsonl", [line]))
    config = DataConfig(name="chat", tokenizer=str(tokenizer), path=path, val_fraction=0)
    plan = plan_batches(1, 1)

    def to_loss() -> None:
        data = open_data(config)
        batch = Batches(data.train.rows(64), plan, 0, data.vocab_size).training(0, 0, 0)
        summed_loss(lambda *_, **__: torch.zeros(()), batch, torch.device("cpu"), 0)

    opened = open_tokenizer(str(tokenizer))
    assert isinstance(opened, FileTokenizer)
    setup = setup_of(open_template(opened, None), opened, "2026-01-31")
    chat, _ = parse_row("messages", line)
    assert isinstance(chat, Chat)
    rendered, _ = counted(lambda: prepare(setup)(chat))
    trained = {file for file in counted(to_loss)[0] if "/fsdpctl/models/" not in file}
    return {"training": len(trained), "rendering": len(rendered - trained)}


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
    """Count, time, and write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    files, calls = counted(dry_run)
    with TemporaryDirectory() as folder, mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
        chats = chat_files(Path(folder))
    found = medians(words.rounds)
    result = {
        "files": len(files),
        "calls": {name: calls[name] for name in ONCE},
        "chat_files": chats,
        "processor_seconds": found,
        "help_over_import_typer": round(found["help"] / found["typer"], 2),
        "estimate_over_import_torch": round(found["estimate_405b"] / found["torch"], 2),
    }
    print(result)
    write_report(words.out, "startup", [result], rounds=words.rounds)


if __name__ == "__main__":
    main()
