"""Parts of the package that only do something on CUDA devices."""

import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from fsdpctl.checkpoint.tensors import Staging
from fsdpctl.predict.profile import read_profile
from fsdpctl.tools import profile_worker
from fsdpctl.tools.observe import SMALL, device_seconds, seconds_of
from tests.distributed import distributed


@pytest.mark.slow
@distributed(world_size=1, on_devices=True)
def test_the_seconds_of_a_device_leave_out_the_launches_of_the_host(
    rank: int, world_size: int
) -> None:
    device = torch.device("cuda", 0)
    values = torch.ones(4, device=device)

    def run() -> None:
        values.add_(1)
        time.sleep(0.3)
        values.add_(1)

    assert device_seconds(run, device, ahead=1.0) < 0.2 < seconds_of(run, device)


@pytest.mark.slow
@distributed(world_size=2, timeout=300, on_devices=True)
def test_ranks_measure_their_devices(
    rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(profile_worker, "LARGE", SMALL[:1])
    monkeypatch.setitem(profile_worker._SIDES, "cuda", 64)
    found = profile_worker.measure(torch.device("cuda", rank), "an emulated device", print)
    file = tmp_path / f"rank-{rank}.json"
    file.write_text(json.dumps(asdict(found)))
    assert read_profile(file).is_cuda
    assert all(point.seconds > 0 for points in found.collectives.values() for point in points)


@distributed(world_size=1, on_devices=True)
def test_memory_for_the_first_save_is_pinned_beforehand(rank: int, world_size: int) -> None:
    tensors = [torch.randn(n, device="cuda") for n in (700, 3)]
    staging = Staging()
    staging.prepare(tensors)
    assert staging._preparing is not None
    staging._preparing.join()
    pinned = [each.data_ptr() for each in staging._chunks]
    copies = staging.copies(tensors)
    assert copies[0].is_pinned()
    assert copies[0].data_ptr() == pinned[0]
    assert [each.data_ptr() for each in staging._chunks] == pinned
    assert all(torch.equal(one, other.cpu()) for one, other in zip(copies, tensors, strict=True))
