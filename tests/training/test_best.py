"""The best checkpoint, and runs that end when their validation loss stops falling."""

import errno
import math
import os
import shutil
from pathlib import Path

import pytest
import torch

from fsdpctl.checkpoint.run_checkpoints import step_folder
from fsdpctl.checkpoint.training_progress import BestValidation, Progress
from fsdpctl.commands.status import read_status
from fsdpctl.config.compose import compose_config
from fsdpctl.errors import StoppedError, UsageError
from fsdpctl.io.run_files import BEST, CHECKPOINTS, LATEST, MANIFEST
from fsdpctl.resolve.prepare import prepare
from fsdpctl.run.directory import StartKind, inspect_run_dir, open_best
from fsdpctl.run.environment import read_start_events
from tests.commands.test_interruptions import wait_for
from tests.distributed import distributed
from tests.hostile import everything_in
from tests.training.ranks import lines, new_trainer, plant_valley, run_args, train

RISES = (
    "data.val_fraction=0.2", "train.eval_every=2", "train.eval_batches=2", "train.steps=40",
    "checkpoint.every=5", "checkpoint.keep_last=1", "checkpoint.keep_best=true",
    "train.patience=3",
)  # fmt: skip


def best_of(run: Path) -> str:
    return os.readlink(run / CHECKPOINTS / BEST)


def test_a_lower_loss_is_better_and_others_are_counted():
    done = Progress(step=10).after_validation(math.nan)
    assert done.best is None
    done = Progress(step=20, owes_validation=True).after_validation(2.0)
    assert (done.best, done.owes_validation) == (BestValidation(2.0, 20), False)
    for loss in (2.0, math.inf):
        done = done.after_validation(loss)
    assert done.best == BestValidation(2.0, 20, unimproved=2)
    assert [done.is_finished(30, patience) for patience in (None, 3, 2)] == [False, False, True]
    assert done.is_finished(20, None)


@pytest.mark.slow
@pytest.mark.parametrize("stops", [(3,), (8,), (2, 4, 5, 9)], ids=str)
def test_an_interrupted_run_ends_and_keeps_as_one_that_was_not(tmp_path, stops):
    ends = {}
    for name, at in (("whole", (0,)), ("stopped", (*stops, 0))):
        folder = tmp_path / name
        folder.mkdir()
        typed = run_args(folder, 2, *RISES, f"train.run_dir={folder / 'run'}")
        for stop in at:
            train(world_size=2, typed=typed, plants={}, stops_at=stop, result=str(folder / "end"))
            error = (folder / "end.error").read_text()
            assert error.startswith("75 stopped at step") if stop else not error
        validated = {e["step"]: e["val_loss"] for e in lines(folder / "run") if "val_loss" in e}
        assert validated == {step: 1 + abs(step - 8) for step in range(2, 16, 2)}
        assert best_of(folder / "run") == "step-00000008"
        there = {each.name for each in (folder / "run" / CHECKPOINTS).glob("step-*")}
        assert there == {"step-00000008", "step-00000014"}  # patience: 3 validations
        assert open_best(str(folder / "run")).manifest.progress.step == 8
        status = read_status(folder / "run")
        why = "no lower validation loss since step 8 (train.patience=3)"
        assert (status.state, status.message) == ("finished", why)
        assert (
            inspect_run_dir(prepare(compose_config(typed)).config, "auto").start_kind
            is StartKind.FINISHED
        )
        longer = [each.replace("patience=3", "patience=9") for each in typed]
        assert (
            inspect_run_dir(prepare(compose_config(longer)).config, "auto").start_kind
            is StartKind.RESUME
        )
        ends[name] = torch.load(folder / "end")
    for key, values in ends["whole"].items():
        assert torch.equal(values, ends["stopped"][key])


def no_links(*options: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("has_links", [True, False])
@distributed(world_size=1)
def test_a_copy_that_follows_links_continues_the_run(
    rank, world_size, has_links, tmp_path, monkeypatch
):
    run, copy = tmp_path / "run", tmp_path / "copy"
    typed = run_args(tmp_path, 1, *RISES, "train.steps=12", f"train.run_dir={run}")
    trainer = new_trainer(typed, lambda: step_folder(run / CHECKPOINTS, 5).exists())
    with plant_valley(trainer), pytest.raises(StoppedError):
        trainer.run()
    shutil.copytree(run, copy)
    before, first = everything_in(run), best_of(run)
    assert (copy / CHECKPOINTS / BEST / MANIFEST).is_file()
    if not has_links:  # as on exFAT
        monkeypatch.setattr(os, "symlink", no_links)
    trainer = new_trainer([*typed[:-1], f"train.run_dir={copy}"])
    with plant_valley(trainer):
        trainer.run()
    best = step_folder(copy / CHECKPOINTS, 8)
    links = {LATEST: "step-00000012", BEST: best.name} if has_links else {}
    assert first == "step-00000004"
    names = {best.name, "step-00000012", *links}
    wait_for(lambda: {each.name for each in (copy / CHECKPOINTS).iterdir()} == names)
    assert {name: os.readlink(copy / CHECKPOINTS / name) for name in links} == links
    for source in (copy, copy / CHECKPOINTS, best):
        assert open_best(str(source)).folder == best
    warnings = [each for record in read_start_events(copy) for each in record.warnings]
    message = f"{copy / CHECKPOINTS / BEST}: cannot link to step-00000004: Operation not permitted"
    assert [each.partition(": ")[2] for each in warnings] == ([] if has_links else [message])
    assert everything_in(run) == before


@pytest.mark.parametrize("more, message", [
    ((), "train.eval_batches=2, or auto .recipe quick sets train.final_eval_batches."),
    (("data.val_fraction=0",), "train.patience: requires validation data"),
    (("train.final_eval_batches=7",), "train.final_eval_batches=7: .* train.eval_batches=2"),
])  # fmt: skip
def test_losses_that_cannot_be_compared_are_refused(tmp_path, more, message):
    with pytest.raises(UsageError, match=message):
        prepare(compose_config(run_args(tmp_path, 1, *RISES, *more), None if more else "quick"))
