"""Complete runs, and the programs that watch them: status and trackers."""

import json
import re
import signal
from pathlib import Path

import pytest

from tests.commands.run import fsdpctl, invoke, run_args
from tests.commands.test_interruptions import ended, has_stepped, start, wait_for


def status(folder: Path) -> dict[str, object]:
    code, printed = invoke("status", str(folder / "run"), "--json")
    assert code == 0
    content: dict[str, object] = json.loads(printed)
    return content


@pytest.mark.slow
def test_a_run_is_seen_to_run_to_stop_to_go_on_and_to_finish(tmp_path):
    process = start(tmp_path, 100_000)
    wait_for(has_stepped(tmp_path))
    result = status(tmp_path)
    assert (result["state"], result["total_steps"]) == ("running", 100_000)
    assert isinstance(result["step"], int)
    assert result["step"] >= 30
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 75
    result = status(tmp_path)
    assert result["state"] == "stopped"
    assert re.match(r"stopped at step \d+ of 100000, saved", str(result["message"]))
    assert isinstance(result["step"], int)
    steps = result["step"] + 5
    assert fsdpctl("train", *run_args(tmp_path, steps), cwd=tmp_path).returncode == 0
    result = status(tmp_path)
    assert (result["state"], result["step"]) == ("finished", steps)
    process = start(tmp_path, 100_000)
    wait_for(has_stepped(tmp_path, steps + 5))
    process.kill()
    process.communicate()
    assert status(tmp_path)["state"] == "killed"


@pytest.mark.slow
def test_only_rank_0_writes_to_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (30, 40):
        run = fsdpctl("train", *run_args(tmp_path, steps, "log.trackers=tensorboard"), cwd=tmp_path)
        assert run.returncode == 0, run.stderr
    board = tmp_path / "run" / "tensorboard"
    assert len(list(board.iterdir())) == 2  # one for each start
    curves = EventAccumulator(str(board))
    curves.Reload()
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    scalars = [(each.step, each.value) for each in curves.Scalars("loss")]
    assert [step for step, _ in scalars] == [step for step, _ in losses] == list(range(1, 41))
    assert [value for _, value in scalars] == pytest.approx([loss for _, loss in losses], rel=1e-6)
    assert {"val_loss", "tokens_per_second"} <= set(curves.Tags()["scalars"])


# Replaces a device that is out of memory: on rank 1, at its third step.
PLANTED = """
import os
if os.environ.get("RANK") == "1":
    import torch
    from fsdpctl.optim.adamw import ShardedAdamW

    torch.cuda.memory._dump_snapshot = lambda path: open(path, "w").close()
    step, steps = ShardedAdamW.step, []

    def fails(self, *args, **about):
        steps.append(1)
        if len(steps) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return step(self, *args, **about)

    ShardedAdamW.step = fails
"""


@pytest.mark.slow
def test_an_out_of_memory_error_names_the_snapshot(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    monkeypatch.setattr(
        "tests.commands.run.environment",
        lambda before=fsdpctl.__globals__["environment"]: {
            **before(), "PYTHONPATH": f"{tmp_path}:{before()['PYTHONPATH']}",
        },
    )  # fmt: skip
    done = fsdpctl("train", *run_args(tmp_path, 20), cwd=tmp_path)
    assert done.returncode == 1
    out = " ".join(re.sub("[│\n]", " ", done.stderr).split())
    assert "run/memory-snapshot-rank-00001.bin" in out
    assert (tmp_path / "run" / "memory-snapshot-rank-00001.bin").is_file()
    result = status(tmp_path)
    assert result["state"] == "failed"
    assert "memory-snapshot-rank-00001.bin" in str(result["message"])
