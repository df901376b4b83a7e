"""As ranks that another launcher starts: torchrun, on one machine and as two nodes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.run import environment, figures, make_text
from tests.launch.test_nodes import SMALL, alone, free_endpoint

pytestmark = pytest.mark.slow
_SECONDS = 180


def _torchrun(folder: Path, options: list[str], *more: str) -> "subprocess.Popen[str]":
    words = [*SMALL, f"data.path={make_text(folder)}", f"train.run_dir={folder / 'run'}", *more]
    return subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", *options,
            "-m", "fsdpctl", "train", "launch=env", *words,
        ],
        cwd=folder, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_torchrun_starts_ranks(tmp_path):
    started = _torchrun(tmp_path, ["--nproc-per-node=2"], "train.steps=30")
    said, _ = started.communicate(timeout=_SECONDS)
    assert started.returncode == 0, said
    assert figures(tmp_path / "run") == alone(tmp_path, 2, "train.steps=30")
    assert said.count("validation loss") == len([1 for *_, val in figures(tmp_path / "run") if val])
    again = _torchrun(tmp_path, ["--nproc-per-node=2"], "train.steps=30")
    said, _ = again.communicate(timeout=_SECONDS)
    assert again.returncode == 0, said
    assert "finished at step 30; nothing to do" in said


def test_each_of_two_nodes_may_have_a_torchrun(tmp_path):
    host, _, port = free_endpoint().rpartition(":")
    options = ["--nproc-per-node=1", "--nnodes=2", f"--master-addr={host}", f"--master-port={port}"]
    started = [
        _torchrun(tmp_path, [*options, f"--node-rank={node}"], "train.steps=30")
        for node in range(2)
    ]
    said = [each.communicate(timeout=_SECONDS)[0] for each in started]
    assert [each.returncode for each in started] == [0, 0], said
    assert figures(tmp_path / "run") == alone(tmp_path, 2, "train.steps=30")


def test_an_invalid_setting_ends_all_ranks(tmp_path):
    started = _torchrun(tmp_path, ["--nproc-per-node=2"], "strategy.owner_map=balanced")
    said, _ = started.communicate(timeout=_SECONDS)
    assert started.returncode == 1  # torchrun's own
    assert "fsdpctl: strategy.owner_map=balanced: only" in said
    assert "fsdpctl: rank 0: strategy.owner_map=balanced: only" in said


def test_a_process_of_torchrun_requires_launch_env(tmp_path):
    words = ["train", *SMALL, f"data.path={make_text(tmp_path)}"]
    done = subprocess.run(
        [sys.executable, "-m", "fsdpctl", *words],
        cwd=tmp_path, env={**environment(), "RANK": "0"}, capture_output=True, text=True,
        timeout=_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "set launch=env" in done.stderr
    assert not os.path.exists(tmp_path / "runs")
