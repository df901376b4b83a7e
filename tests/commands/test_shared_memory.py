"""Ranks that share memory, and those that cannot."""

import subprocess
from pathlib import Path

import pytest

from fsdpctl.config.compose import compose_config
from fsdpctl.launch.run_lines import _strategy
from tests.commands.run import TINY, command, environment, make_text

REFUSES = """
import os
def refuse(pid): raise OSError(38, "Function not implemented")
os.pidfd_open = refuse
"""


@pytest.mark.slow
def test_a_run_says_that_its_ranks_cannot_share_memory(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(REFUSES)
    text = f"data.path={make_text(tmp_path)}"
    words = [*TINY, text, "train.steps=1", f"train.run_dir={tmp_path / 'run'}"]
    given = environment()
    found = subprocess.run(
        command("train", *words),
        env=given | {"PYTHONPATH": f"{tmp_path}:{given['PYTHONPATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "ranks do not share memory: not supported on " in found.stdout + found.stderr


@pytest.mark.parametrize(("words", "text"), [
    ([], "full_shard (ZeRO-3, FSDP) (ranks share memory: runs as shard_optimizer)"),
    (["strategy=shard_optimizer"], "shard_optimizer (ZeRO-1), sharing memory"),
    (["launch.share_memory=false"], "full_shard (ZeRO-3, FSDP)"),
    (["launch.nnodes=2"], "full_shard (ZeRO-3, FSDP)"),
    (["engine=fsdp2"], "full_shard (ZeRO-3, FSDP)"),
])  # fmt: skip
def test_the_first_lines_say_whether_ranks_share_memory(words: list[str], text: str) -> None:
    config = compose_config(["launch.device=cpu", "launch.nproc_per_node=2", *words]).config
    assert _strategy(config, 2 * config.launch.nnodes) == text
