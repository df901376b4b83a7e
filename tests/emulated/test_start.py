"""The start of a run on CUDA devices: slow reads do not time out."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdpctl.comm.rank_status import DRAWING, STATUS_PAGE
from fsdpctl.training import assemble
from tests.distributed import distributed
from tests.training.ranks import new_trainer, run_args


@pytest.mark.slow
@distributed(world_size=2, timeout=120, on_devices=True)
def test_reads_longer_than_the_timeout_of_nccl_end_no_run(rank, world_size, tmp_path, monkeypatch):
    seconds = 10
    device = torch.device("cuda", rank)
    world: Any = dist.group.WORLD
    world._get_backend(device).options._timeout = timedelta(seconds=seconds / 2)
    fill, beats = assemble._load_state, []

    def slow_on_one(*args: Any) -> Any:
        time.sleep(seconds * rank)
        return fill(*args)

    monkeypatch.setattr(assemble, "_load_state", slow_on_one)
    monkeypatch.setattr(type(STATUS_PAGE), "at", lambda self, place, step=None: beats.append(place))
    typed = run_args(tmp_path, 2, "launch.device=cuda", f"train.run_dir={tmp_path / 'run'}")
    trainer = new_trainer([*typed, "train.steps=2", "precision=fp32"], device=device)
    module = trainer.parts.model.module
    # The launcher detects progress by these records.
    assert beats.count(DRAWING) == len(list(module.parameters()))
    trainer.run()
