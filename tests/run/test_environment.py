"""environment.json: the software and hardware of each start of a run."""

import json
import os
import platform
import shlex
import subprocess
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdpctl.io.run_files import ENVIRONMENT, OVERRIDES_FILE
from fsdpctl.launch.restarts import made_progress
from fsdpctl.launch.run_summary import _changed_versions
from fsdpctl.run.directory import StartKind
from fsdpctl.run.environment import (
    MAX_STARTS,
    Restart,
    add_start,
    describe_start,
    device_name,
    git_commit,
    read_start_events,
    read_starts,
    relevant_variables,
    write_start_events,
)


def git(folder: Path, *args: str) -> str:
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    typed = ["git", *who, *args]
    done = subprocess.run(typed, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / "file").write_text("one\n")
    git(folder, "add", "file")
    git(folder, "commit", "--quiet", "--message=one")
    return folder


def test_a_start_records_ranks_devices_command_and_commit(tmp_path, checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    (tmp_path / OVERRIDES_FILE).write_text("model=gpt2\ntrain.steps=3\n")
    result = describe_start(tmp_path, ["X", "X", "Y"])
    assert (json.loads(json.dumps(result)), result["devices"]) == (result, {"X": 2, "Y": 1})
    assert result["command"] == ["model=gpt2", "train.steps=3"]
    assert (result["torch"], result["python"]) == (torch.__version__, platform.python_version())
    assert result["commit"] == git(checkout, "rev-parse", "HEAD")
    assert device_name(torch.device("cpu")) == "cpu"


@pytest.mark.parametrize("name", ["torch", "transformers", "fsdpctl", "python"])
@pytest.mark.parametrize("is_forked", [False, True])
def test_a_run_that_resumes_with_other_versions_reports_them(tmp_path, name, is_forked):
    start = describe_start(tmp_path, ["cpu"])
    before, now = {**start, name: "0.0.7"}, start[name]
    add_start(tmp_path, start if is_forked else before)
    source = SimpleNamespace(manifest=SimpleNamespace(versions=before)) if is_forked else None
    seen: Any = SimpleNamespace(start_kind=StartKind.RESUME, run_dir=tmp_path, source=source)
    assert _changed_versions(seen) == f"{name} was 0.0.7, is {now}, which may change the losses"
    add_start(tmp_path, start)
    seen.source = None
    assert _changed_versions(seen) == ""
    (tmp_path / ENVIRONMENT).write_text('{"starts": [{"torch": 7}]}')
    assert _changed_versions(seen) == ""


def test_only_variables_that_affect_the_computation_are_recorded():
    recorded = {"NCCL_DEBUG": "a", "CUDA_VISIBLE_DEVICES": "0", "PYTORCH_ALLOC_CONF": "c"}
    secrets = {"WANDB_API_KEY": "s", "AWS_SECRET_ACCESS_KEY": "s", "MY_NCCL_": "s", "HOME": "/"}
    assert relevant_variables({**secrets, **recorded}) == recorded


def test_the_record_is_that_of_the_newest_start(tmp_path):
    for number in range(2):
        add_start(tmp_path, {"started": number})
        assert not made_progress(tmp_path, 1)
        write_start_events(tmp_path, {"step": 5 * number, "warnings": ["b"] * number})
    first, second = read_start_events(tmp_path)
    assert (first.step, first.warnings, second.step, second.warnings) == (0, [], 5, ["b"])
    write_start_events(tmp_path, {"restart": asdict(Restart(1, "lost", 1e9, 3))})
    assert made_progress(tmp_path, 1)
    assert not made_progress(tmp_path, 2)
    add_start(tmp_path, {})  # another launcher, before its first restart
    assert not made_progress(tmp_path, 1)


def test_the_newest_starts_are_kept(tmp_path):
    for number in range(MAX_STARTS + 2):
        add_start(tmp_path, {"started": number})
    assert [each["started"] for each in read_starts(tmp_path)] == [*range(2, MAX_STARTS + 2)]


@pytest.mark.parametrize("content", ["", "[]", '{"starts": 1}'])
def test_an_unreadable_file_does_not_prevent_a_start(tmp_path, content):
    (tmp_path / ENVIRONMENT).write_text(content)
    add_start(tmp_path, {"started": 1})
    assert read_starts(tmp_path) == [{"started": 1}]
    add_start(tmp_path / "not there", {})


def test_the_commit_is_found_in_packed_refs_detached_heads_and_worktrees(checkout, tmp_path):
    expected = git(checkout, "rev-parse", "HEAD")
    below = checkout / "a" / "b"
    below.mkdir(parents=True)
    assert git_commit(below) == expected
    git(checkout, "pack-refs", "--all")
    assert not (checkout / ".git" / "refs" / "heads" / "main").exists()
    assert git_commit(checkout) == expected
    git(checkout, "checkout", "--quiet", "--detach")
    assert git_commit(checkout) == expected
    odd = tmp_path / os.fsdecode("a\nb\u2028c".encode())  # also if the locale is ASCII
    git(checkout, "worktree", "add", "--quiet", str(odd), "main")
    assert git_commit(odd) == expected


@pytest.mark.parametrize(
    "head", ["", "ref: refs/heads/none", "ref: ../../../etc/passwd", "x" * 10_000, "ref: refs/../x"]
)
def test_a_folder_without_a_commit_has_none(checkout, tmp_path, head):
    (checkout / ".git" / "HEAD").write_text(head)
    assert (git_commit(checkout), git_commit(tmp_path)) == (None, None)


def test_programs_that_a_repository_configures_are_not_executed(checkout, tmp_path):
    """git would run all of these; `git status` at the end shows that it does."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch '{tmp_path}/ran'\ncat\n")
    program.chmod(0o755)
    for key in ("core.fsmonitor", "filter.x.clean", "filter.x.smudge", "diff.x.textconv",
                "diff.x.command", "diff.external", "core.sshCommand", "core.pager"):  # fmt: skip
        git(checkout, "config", key, shlex.quote(str(program)))
    (checkout / ".gitattributes").write_text("* filter=x diff=x\n")
    (checkout / "file").write_text("two\n")
    assert git_commit(checkout) is not None
    assert not (tmp_path / "ran").exists()
    git(checkout, "status")
    assert (tmp_path / "ran").exists()


def test_the_commit_is_unknown_without_git(checkout, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit(checkout) is None
