"""A rank that fails alone while its process group blocks, and signals."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fsdpctl.comm.rank_status import FINISHING, STATUS_PAGE, HostPages, make_status_file
from fsdpctl.training import worker
from fsdpctl.training.worker import STATUS_FILE
from tests.commands.run import TINY, command, environment, make_text
from tests.distributed import distributed

# Imitates NCCL: destroying the process group blocks, and so does a checkpoint's thread.
PLANTED = """
import os, time
if "RANK" in os.environ:
    import torch.distributed as dist
    from fsdpctl.training import trainer
    from fsdpctl.training.callbacks import checkpoints

    dist.destroy_process_group = lambda *group: time.sleep(3600)
    launch = trainer.Trainer._launch

    def fails(self):
        if self.step == 5 and os.environ["RANK"] == "1":
            raise RuntimeError("planted on one rank")
        launch(self)

    trainer.Trainer._launch = fails
    if "BLOCKS_SAVING" in os.environ:
        checkpoints.write_checkpoint = lambda *about: time.sleep(3600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("blocks_saving", [False, True])
def test_the_error_of_one_rank_ends_the_run_at_once(tmp_path: Path, blocks_saving: bool) -> None:
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    tiny = [arg for arg in TINY if not arg.startswith("checkpoint.every")]
    args = [*tiny, f"data.path={make_text(tmp_path)}", "train.steps=20", "launch.timeout=300"]
    args += ["checkpoint.every=3", "train.run_dir=run"]
    options = {**environment(), "PYTHONPATH": f"{tmp_path}:{environment()['PYTHONPATH']}"}
    if blocks_saving:
        options["BLOCKS_SAVING"] = "1"
    began = time.monotonic()
    done = subprocess.run(
        command("train", *args),
        cwd=tmp_path, env=options, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    out = " ".join(done.stderr.split())
    assert "rank 1" in out
    assert "planted on one rank" in out
    assert time.monotonic() - began < 90


ARRIVES = """
import os, signal, sys
from fsdpctl.training import worker

worker.die_with_launcher()

def wait_for_all():
    {}

worker._handle_signals(wait_for_all)
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(5 if worker._stop_signal == signal.SIGTERM else 6)
"""


@pytest.mark.parametrize(("meanwhile", "code"), [
    ("pass", 5),  # received
    ("os.kill(os.getpid(), signal.SIGTERM)", 5),
    # The same signal ended a peer before this rank received the signal.
    ("os.kill(os.getpid(), signal.SIGTERM); raise OSError('closed by peer')", -signal.SIGTERM),
    ("raise OSError('closed by peer')", 1),
])  # fmt: skip
def test_a_signal_that_another_rank_received_first_is_not_a_failure(meanwhile, code):
    done = subprocess.run(
        [sys.executable, "-c", ARRIVES.format(meanwhile)], env=environment(), timeout=60,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr


@distributed(world_size=1)
def test_a_script_that_continues_after_training_does_not_count_as_hung(
    rank: int, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, task = make_status_file(1, tmp_path), object()
    variables = {STATUS_FILE: path, "RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(worker, "_join_and_train", lambda *_, **__: STATUS_PAGE.at("data", 5))
    work: Any = worker._run_and_exit
    work(tmp_path, task=task)
    STATUS_PAGE.at("forward blocks.0")  # the script uses fsdpctl's engine, then code of its own
    (status,) = HostPages(path).statuses()
    assert status.phase == FINISHING
