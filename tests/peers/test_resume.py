"""Runs that resume under another engine and on another number of ranks, with equal losses."""

import json
from pathlib import Path

import pytest

from tests.commands.run import fsdpctl
from tests.peers.runs import ALONE, DDP, FSDP2, HYBRID, TOLERANCE, begin, losses, train
from tests.training.ranks import words

FSDPCTL = ["engine=fsdpctl"]
WAYS = [
    ((FSDP2, 2), (FSDPCTL, 2)), ((FSDPCTL, 2), (FSDP2, 2)), ((FSDP2, 2), (FSDPCTL, 3)),
    ((FSDPCTL, 3), (HYBRID, 4)), ((HYBRID, 4), (DDP, 2)),
    ((DDP, 3), ([*FSDPCTL, "strategy=shard_optimizer"], 2)), ((ALONE, 2), (FSDPCTL, 1)),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_run_resumes_under_another_engine(way, tmp_path):
    (first, ranks), (then, other_ranks) = way
    train(world_size=2, starts=[begin(tmp_path, 2, "undisturbed", "train.steps=8")])
    train(world_size=ranks, starts=[begin(tmp_path, ranks, "run", "train.steps=4", *first)])
    more = ["train.steps=8", *then]
    train(world_size=other_ranks, starts=[begin(tmp_path, other_ranks, "run", *more)])
    expected = losses(tmp_path / "undisturbed")
    assert len(expected) == 8
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=TOLERANCE)


def run(folder: Path, name: str, ranks: int, steps: int, *engine: str) -> None:
    where = [f"train.run_dir={name}", f"train.steps={steps}", *engine]
    done = fsdpctl("train", *words(folder, ranks, *where), cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_that_changes_engines_trains_as_well(tmp_path: Path) -> None:
    run(tmp_path, "ours", 2, 15)
    run(tmp_path, "changed", 2, 5, *FSDP2)
    run(tmp_path, "changed", 3, 10, *FSDPCTL)
    run(tmp_path, "changed", 2, 15, *DDP)
    assert losses(tmp_path / "changed") == pytest.approx(losses(tmp_path / "ours"), rel=TOLERANCE)
    found = []
    for name in ("changed", "ours"):
        said = fsdpctl("evaluate", name, "data.val_fraction=0.1", "--json", cwd=tmp_path)
        assert said.returncode == 0, said.stdout + said.stderr
        found.append(json.loads(said.stdout)["loss"])
    assert found[0] == pytest.approx(found[1], rel=TOLERANCE)
    for command in (["sample", "changed"], ["status", "changed"], ["verify-checkpoint", "changed"]):
        done = fsdpctl(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert fsdpctl("consolidate-checkpoint", "changed", "whole", cwd=tmp_path).returncode == 0
    assert (tmp_path / "whole" / "model.safetensors").is_file()
