"""The command that is run on each checkpoint."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdpctl.checkpoint.folders import complete_checkpoints
from fsdpctl.config.training import CheckpointConfig
from fsdpctl.errors import UsageError
from fsdpctl.io.run_files import CHECKPOINTS, LOGS
from fsdpctl.resolve.rules import command_words
from fsdpctl.training.callbacks import each_save
from fsdpctl.training.callbacks.each_save import EachSave, SaveOutcome
from tests.checkpoint.test_saver import fake_checkpoints
from tests.commands.run import environment
from tests.run.test_heartbeat import wait_for


def script(folder: Path, text: str) -> list[str]:
    """A program that does `text`."""
    file = folder / "command.sh"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return [str(file)]


def made(folder: Path, words: list[str], **about: Any) -> tuple[EachSave, list[SaveOutcome]]:
    """The runner, and what it will have told."""
    told: list[SaveOutcome] = []
    (folder / LOGS).mkdir()
    keep = CheckpointConfig(**{"keep_last": 0, **about})
    return EachSave(keep, folder, told.append, words=words), told


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_command_runs_on_each_checkpoint_in_order_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    out = tmp_path / "out"
    text = (
        f'mkdir {tmp_path}/alone || exit 9; echo "$FSDPCTL_STEP $FSDPCTL_CHECKPOINT $2" >> {out}; '
        f'sleep 0.05; rmdir {tmp_path}/alone; test -z "$WORLD_SIZE$TORCHELASTIC_RUN_ID"'
    )
    runner, told = made(tmp_path, [*script(tmp_path, text), "a word"])
    folders = fake_checkpoints(tmp_path / "checkpoints", 10, 20, 30)
    began = time.monotonic()
    for step, folder in zip((10, 20, 30), folders, strict=True):
        runner.add(folder, step)
    assert time.monotonic() - began < 0.1  # the run does not wait for it
    runner.wait(pytest.fail)
    assert [(each.step, each.outcome, each.message) for each in told] == [
        (10, "done", ""), (20, "done", ""), (30, "done", ""),
    ]  # fmt: skip
    lines = [f"{step} {each} {each}" for step, each in zip((10, 20, 30), folders, strict=True)]
    assert out.read_text().splitlines() == lines
    assert told[0].to_line() == {
        "step": 10, "after_save_seconds": round(told[0].seconds, 6),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo first; echo ' no such bucket ' >&2; echo; exit 3", "exit code 3: no such bucket ("),
        ("kill -9 $$", "killed by SIGKILL"),
        ("exit 1", "exit code 1"),
    ],
)
def test_a_failure_is_reported_with_its_last_line_and_the_next_command_runs(tmp_path, text, said):
    runner, told = made(tmp_path, script(tmp_path, f'test "$FSDPCTL_STEP" = 20 && exit 0\n{text}'))
    for step, folder in zip((10, 20), fake_checkpoints(tmp_path / "c", 10, 20), strict=True):
        runner.add(folder, step)
    runner.wait(pytest.fail)
    assert [each.outcome for each in told] == ["failed", "done"]
    assert told[0].message.startswith(f"checkpoint.after_save: {said}")


def test_a_hanging_command_is_ended_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(each_save, "_GRACE_SECONDS", 0.3)
    text = f"trap '' TERM; sleep 600 & echo $! > {tmp_path}/pid; wait; sleep 600"
    runner, told = made(tmp_path, script(tmp_path, text), after_save_timeout=0.5)
    runner.add(fake_checkpoints(tmp_path / "c", 10)[0], 10)
    wait_for(lambda: told)
    assert told[0].outcome == "timed out"
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: has_ended(pid))


def test_the_end_of_a_run_waits_for_a_limited_time(tmp_path, monkeypatch):
    monkeypatch.setattr(each_save, "_REPORT_INTERVAL", 0.2)
    runner, told = made(tmp_path, script(tmp_path, "sleep 600"), after_save_timeout=0.5)
    for step, folder in zip((10, 20), fake_checkpoints(tmp_path / "c", 10, 20), strict=True):
        runner.add(folder, step)
    said: list[str] = []
    began = time.monotonic()
    runner.wait(said.append)
    assert time.monotonic() - began < 10
    assert said[0].startswith("waiting for checkpoint.after_save: 0 s")
    first, second = (each.outcome for each in told)
    assert first == "timed out"
    assert second in ("timed out", "failed")  # its turn came in the last moment, or not


def test_a_checkpoint_is_not_deleted_while_the_command_runs_on_it(tmp_path):
    runner, told = made(
        tmp_path, script(tmp_path, f"cat {tmp_path}/gate; ls $1/manifest.json"), keep_last=1
    )
    os.mkfifo(tmp_path / "gate")
    folder = tmp_path / CHECKPOINTS
    one, two, three = fake_checkpoints(folder, 10, 20, 30)
    runner.add(one, 10)
    wait_for(lambda: runner.busy == one)
    runner.add(two, 20)
    runner.remove_old()
    assert complete_checkpoints(folder) == [one, three]
    (tmp_path / "gate").write_text("")
    runner.wait(pytest.fail)
    assert [(each.step, each.outcome) for each in told] == [(10, "done"), (20, "failed")]
    assert "checkpoint deleted before its turn" in told[1].message
    assert complete_checkpoints(folder) == [three]


def test_without_a_command_nothing_runs(tmp_path):
    threads = threading.active_count()
    runner, told = made(tmp_path, [])
    runner.add(tmp_path, 10)
    runner.wait(pytest.fail)
    assert told == []
    assert threading.active_count() <= threads  # one of another test may have ended meanwhile
    assert list((tmp_path / LOGS).iterdir()) == []


def test_a_deleted_program_is_a_failure_of_the_command_only(tmp_path):
    words = script(tmp_path, "exit 0")
    runner, told = made(tmp_path, words)
    Path(words[0]).unlink()
    runner.add(fake_checkpoints(tmp_path / "c", 10)[0], 10)
    runner.wait(pytest.fail)
    assert told[0].outcome == "failed"
    assert "No such file" in told[0].message


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel has to see to it")
def test_the_command_ends_with_the_rank_that_started_it(tmp_path):
    words = script(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 600")
    folder = fake_checkpoints(tmp_path / "c", 10)[0]
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from fsdpctl.config.training import CheckpointConfig\n"
        "from fsdpctl.training.callbacks.each_save import EachSave\n"
        f"(run := Path({str(tmp_path)!r}) / 'logs').mkdir()\n"
        f"runner = EachSave(CheckpointConfig(), run.parent, print, words={words!r})\n"
        f"runner.add(Path({str(folder)!r}), 10)\ntime.sleep(600)"
    )
    rank = subprocess.Popen([sys.executable, "-c", code], env=environment())
    wait_for(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text())
    command = int((tmp_path / "pid").read_text())
    assert not has_ended(command)
    rank.kill()
    rank.wait()
    wait_for(lambda: has_ended(command))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("rsync 'a", "no closing quotation"),
        ("  ", "expected a command"),
        ("no-such-program a b", "program no-such-program not found"),
    ],
)
def test_an_invalid_command_is_rejected_before_the_run(command, said):
    with pytest.raises(UsageError, match=rf"checkpoint.after_save={command}: {said}"):
        command_words(command)
    assert command_words("echo 'a b' $HOME;") == ["echo", "a b", "$HOME;"]  # no shell
