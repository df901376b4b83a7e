"""The start of a run on CUDA devices: weights are drawn there, and slow readers have time."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdpctl.comm.rank_status import LOADING, RANK_STATUS
from fsdpctl.config.any_decoder import declared
from fsdpctl.config.compose import compose_config
from fsdpctl.models import registry
from fsdpctl.training import assemble
from tests.distributed import distributed
from tests.training.ranks import made, words

MODEL = compose_config([]).config.model


@distributed(world_size=1, on_devices=True)
def test_large_matrices_are_drawn_on_the_device_by_name(
    rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "DRAWN_ON_DEVICE", 4096)
    monkeypatch.setattr(registry, "_DRAWN_AT_ONCE", 512)

    def drawn(name: str, width: int) -> torch.Tensor:
        whole = torch.empty(64, width, device="cuda", dtype=torch.bfloat16)
        torch.cuda.reset_peak_memory_stats()
        registry.initialize_parameter(name, whole, seed=0, config=MODEL)
        extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        assert extra <= 3 * 512 * 4  # in parts
        return whole

    torch.cuda.set_sync_debug_mode("error")  # nothing comes from the host
    one, again, other = (drawn(name, 64) for name in ("a.weight", "a.weight", "b.weight"))
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert one.float().std().item() == pytest.approx(declared(MODEL, "initializer_range"), rel=0.05)
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing"):
        drawn("a.weight", 16)  # a small one does
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.slow
@distributed(world_size=2, timeout=120, on_devices=True)
def test_a_rank_that_reads_longer_than_nccl_waits_ends_nobody(
    rank: int, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 10
    device = torch.device("cuda", rank)
    world: Any = dist.group.WORLD
    world._get_backend(device).options._timeout = timedelta(seconds=seconds / 2)
    fill, beats = assemble._fill, []

    def slow_on_one(*given: Any) -> Any:
        time.sleep(seconds * rank)
        return fill(*given)

    monkeypatch.setattr(assemble, "_fill", slow_on_one)
    monkeypatch.setattr(type(RANK_STATUS), "at", lambda self, place, step=None: beats.append(place))
    typed = words(tmp_path, 2, "launch.device=cuda", f"train.run_dir={tmp_path / 'run'}")
    trainer = made([*typed, "train.steps=2", "precision=fp32"], device=device)
    module = trainer.parts.model.module
    assert beats.count(LOADING) == len(list(module.parameters()))  # the launcher sees it live
    trainer.run()
