"""The size of a start: files, calls and seconds of the command before its first step.

    python -m benchmarks.startup --out benchmarks/results/startup.json

Counts the package's files of which a function runs in the launcher for `train strategy=auto
--dry-run`, the calls of what should run once, and the files between a line of chat and its loss.
Then times `fsdpctl --help` against an empty Typer program, and the estimate of a model of 405
billion parameters on 16,384 ranks: medians.
"""

import argparse
import os
import subprocess
import sys
import time
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


def chat_files(folder: Path) -> dict[str, int]:
    """Count the files that run between a line of chat and its loss, without those of the model.

    Returns:
        The number in the process that trains, and in the process that renders the template.
    """
    import torch

    from fsdpctl.config.data import DataConfig
    from fsdpctl.data.batches import Batches
    from fsdpctl.data.chats.formats import Chat, parse_line
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
    setup = setup_of(open_template(tokenizer, None), opened, "2026-01-31")
    chat = parse_line("messages", line)
    assert isinstance(chat, Chat)
    rendered, _ = counted(lambda: prepare(setup)(chat))
    trained = {file for file in counted(to_loss)[0] if "/fsdpctl/models/" not in file}
    return {"training": len(trained), "rendering": len(rendered - trained)}


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
    with TemporaryDirectory() as folder, mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
        chats = chat_files(Path(folder))
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
        "chat_files": chats,
        "seconds": found,
        "help_over_empty": round(found["help"] / found["empty"], 2),
    }
    print(result)
    if words.out:
        write_report(words.out, "startup", [result])


if __name__ == "__main__":
    main()
