"""Garbage collection of Python objects: the steps at which a run collects, and the state after."""

import gc
import weakref
from typing import Any
from unittest import mock

import pytest

from fsdpctl.errors import StoppedError
from fsdpctl.training import trainer as module
from fsdpctl.training.trainer import Callback, Trainer, synchronized_gc
from tests.distributed import distributed
from tests.training.ranks import new_trainer, run_args

EVERY = 4


class Cycle:
    def __init__(self) -> None:
        self.own = self


class Litter(Callback):
    """A callback that leaves a reference cycle in every step; rank 1 allocates more objects."""

    def __init__(self) -> None:
        self.left: list[weakref.ref[Cycle]] = []
        self.most = 0

    def after_launch(self, run: Trainer) -> None:
        self.left.append(weakref.ref(Cycle()))
        self.most = max(self.most, sum(each() is not None for each in self.left))
        _ = [[] for _ in range(5000 * run.collectives.rank)]
        if run.step == 11:
            gc.callbacks.clear()
            raise StoppedError("planted")


@pytest.mark.parametrize("is_enabled", [True, False])
@distributed(world_size=2)
def test_all_ranks_collect_after_the_same_steps(rank, world_size, is_enabled, tmp_path):
    typed = run_args(tmp_path, 2, "train.steps=12", "checkpoint.every=6", "data.val_fraction=0.1",
                  "train.eval_every=7", f"train.run_dir={tmp_path}/run")  # fmt: skip
    trainer, litter, results = new_trainer(typed), Litter(), []
    trainer._callbacks = [*trainer._callbacks, litter]

    def note(phase: str, options: dict[str, Any]) -> None:
        if phase == "start":
            results.append((trainer.step, options["generation"]))

    (gc.enable if is_enabled else gc.disable)()
    frozen = gc.get_freeze_count()
    gc.callbacks.append(note)
    with mock.patch.object(module, "_STEPS_BETWEEN_GC", EVERY), pytest.raises(StoppedError):
        trainer.run()
    assert gc.isenabled() == is_enabled
    assert gc.get_freeze_count() <= frozen
    gc.enable()
    assert (0, 2) in results
    # After every fourth step, before a checkpoint and after a validation.
    assert [each for each in results if each[0]] == [(4, 2), (6, 2), (7, 2), (8, 2)]
    assert litter.most == EVERY


@pytest.mark.slow
def test_what_was_alive_is_visited_again_after_the_block():
    gc.unfreeze()
    with synchronized_gc():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    gc.freeze()  # as the test suite does
