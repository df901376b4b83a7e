"""Runs whose blocks Inductor compiles, as a user starts them."""

import json
import subprocess
import sys

import pytest

from tests.commands.run import environment, figures, fsdpctl, run_args

SHARDED = ["strategy=full_shard", "launch.share_memory=false", "launch.nproc_per_node=2"]
GAVE_UP = "train.compile=true: a function runs uncompiled from now on: "
CHANGING = """
from torch import nn
import fsdpctl
from docs.examples.regression import Measurements, Model, squared_error

class Block(nn.Linear):
    name = "0"
    def forward(self, x):
        self.name = f"{int(self.name) + 1}"
        return super().forward(x)

model = Model()
model.blocks = nn.Sequential(*(Block(64, 64) for _ in range(3)))
fsdpctl.train(module=model, loss=squared_error, data=Measurements(99, 0), settings=[
    "train.steps=12", "train.global_batch_size=4", "train.compile=true", "train.run_dir=run",
    "train.self_check=off",
])
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", [
    [], ["optimizer.state_dtype=int8"], ["activation_checkpointing=full", "accumulation.steps=2"],
])  # fmt: skip
def test_sharded_blocks_are_compiled_to_the_end_of_a_run(tmp_path, more):
    losses = []
    for is_compiled in ("true", "false"):
        variant = [f"train.compile={is_compiled}", f"train.run_dir={is_compiled}", *SHARDED, *more]
        args = run_args(tmp_path, 4, "model.num_layers=12", *variant)
        done = fsdpctl("train", *args, cwd=tmp_path, timeout=900)
        assert done.returncode == 0, done.stderr
        assert "uncompiled" not in done.stdout
        losses.append([loss for _, loss, _ in figures(tmp_path / is_compiled) if loss])
    compiled, eager = losses
    assert compiled == pytest.approx(eager, abs=1e-4)


@pytest.mark.slow
def test_a_run_says_once_that_dynamo_gave_up(tmp_path):
    command = [sys.executable, "-c", CHANGING]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(GAVE_UP) == 1
    out = next(line for line in done.stdout.splitlines() if GAVE_UP in line)
    assert "hit config.recompile_limit (8)" in out
    (start,) = json.loads((tmp_path / "run/environment.json").read_text())["starts"]
    (recorded,) = [each for each in start["record"]["warnings"] if GAVE_UP in each]
    assert recorded.partition(GAVE_UP)[2] in out
