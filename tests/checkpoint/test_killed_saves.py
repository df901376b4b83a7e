"""A save killed at any time leaves a complete newest checkpoint, and the run resumes from it."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fsdpctl.checkpoint.initial_weights import BaseWeights
from fsdpctl.checkpoint.load import load_into
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.run_checkpoints import (
    describe_incomplete,
    newest_checkpoint,
    remove_interrupted_saves,
)
from fsdpctl.checkpoint.training_progress import Progress
from fsdpctl.comm.mesh import ObjectExchange
from fsdpctl.config.schema import Config
from fsdpctl.config.training import CheckpointConfig
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.io.run_files import CHECKPOINTS
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.training.callbacks.checkpoints import Checkpoints
from tests.checkpoint.killer import Killer
from tests.checkpoint.test_round_trip import read_everything, train_on, trained, whole_tensors
from tests.distributed import distributed

MODES = ("sync", "async")


def make_saver(
    folder: Path, mode: str, keep_last: int = 1, bases: Sequence[BaseWeights] = ()
) -> Checkpoints:
    config = replace(Config(), checkpoint=CheckpointConfig(mode=mode, keep_last=keep_last))
    (folder / CHECKPOINTS).mkdir(exist_ok=True)
    return Checkpoints(config, ObjectExchange(), Mock(run_dir=folder), bases, uploads=False)


def run_at(model: ShardedModel, optimizer: ShardedAdamW, step: int) -> Any:
    """Return a run after `step`."""
    parts = SimpleNamespace(model=model, optimizer=optimizer)
    return Mock(parts=parts, step=step, progress=lambda: Progress(step, samples=step))


def save(saver: Checkpoints, model: ShardedModel, optimizer: ShardedAdamW, step: int) -> None:
    saver.save(run_at(model, optimizer, step))
    saver.complete_save(run_at(model, optimizer, step))
    assert saver.fraction_written is None


@distributed(world_size=2)
def save_two(rank: int, world_size: int, folder: Path, mode: str, victim: int, point: int) -> None:
    """Save twice, the second in place of the first; kill the victim during the second save."""
    model, optimizer = trained("full_shard", steps=1)
    saver = make_saver(folder, mode)
    save(saver, model, optimizer, 1)
    train_on(model, optimizer, 1)
    if rank == victim:
        Killer(folder, point)
    save(saver, model, optimizer, 2)


@distributed(world_size=2)
def resume_run(rank: int, world_size: int, folder: Path, mode: str) -> None:
    """Do what a restarted run does: clean up, load, train, save."""
    if rank == 0:
        remove_interrupted_saves(folder / CHECKPOINTS)
    newest = newest_checkpoint(folder / CHECKPOINTS)
    assert newest is not None
    model, optimizer = trained("full_shard", steps=0)
    done = load_into(CheckpointReader(newest), model, optimizer)
    train_on(model, optimizer, 1)
    save(make_saver(folder, mode), model, optimizer, done.step + 1)


def kill_points(folder: Path, mode: str, victim: int) -> Iterator[int]:
    """Yield each kill point after its killed saves, until the saves complete."""
    for point in count():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            save_two(folder=folder, mode=mode, victim=victim, point=point)
        except AssertionError:  # a rank is dead, or lost another rank
            yield point
        else:
            return


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_a_save_killed_anywhere_leaves_a_complete_newest_checkpoint(tmp_path, mode, victim):
    save_two(folder=tmp_path, mode=mode, victim=-1, point=0)
    newest = newest_checkpoint(tmp_path / CHECKPOINTS)
    assert newest is not None
    second = whole_tensors(newest)
    results: dict[str, int] = {}
    for point in kill_points(tmp_path / "run", mode, victim):
        checkpoints = tmp_path / "run" / CHECKPOINTS
        newest = newest_checkpoint(checkpoints)
        assert newest is not None, point
        assert describe_incomplete(checkpoints) == [], point
        read_everything(newest)
        results[newest.name] = results.get(newest.name, 0) + 1
        if newest.name == "step-00000002":
            saved = whole_tensors(newest)
            assert all(torch.equal(saved[key], second[key]) for key in second)
        if point % 6 == victim:
            resume_run(folder=tmp_path / "run", mode=mode)
            later = newest_checkpoint(checkpoints)
            assert later is not None
            assert later.name > newest.name
    assert results["step-00000001"] >= 15
    if victim == 0:  # rank 0 publishes checkpoints
        assert results["step-00000002"] >= 4
        assert sum(results.values()) >= 30
