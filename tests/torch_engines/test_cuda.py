"""PyTorch's engines on a device."""

import json
from pathlib import Path

import pytest
import torch

from tests.commands.run import fsdpctl
from tests.torch_engines.runs import DDP, FSDP2, losses
from tests.training.ranks import run_args

pytestmark = [
    pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_on_a_device_equal_those_of_fsdpctl(precision: str, tmp_path: Path) -> None:
    each = {"ours": [], "fsdp2": FSDP2, "ddp": DDP}
    for name, more in each.items():
        settings = [f"train.run_dir={name}", "train.steps=5", f"precision={precision}"]
        options = run_args(tmp_path, 1, *settings, "launch.device=cuda", *more)
        done = fsdpctl("train", *options, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    tolerance = 1e-5 if precision == "fp32" else 2e-3
    expected = pytest.approx(losses(tmp_path / "ours"), rel=tolerance)
    for name in ("fsdp2", "ddp"):
        assert losses(tmp_path / name) == expected, name
    lines = [json.loads(line) for line in (tmp_path / "ddp/metrics.jsonl").read_text().splitlines()]
    assert all(0 <= line["exposed_communication_seconds"] < 1 for line in lines if "loss" in line)
