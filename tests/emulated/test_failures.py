"""Signals, hanging ranks and several hosts on CUDA devices."""

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests import emulated
from tests.commands.run import command, figures
from tests.commands.test_interruptions import ended, has_stepped, wait_for
from tests.emulated.test_trainer import FP32, assert_close, environment, train
from tests.launch.hosts import hosts
from tests.launch.test_restarts import _workers
from tests.training.ranks import run_args

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(emulated.missing() is not None, reason=str(emulated.missing())),
]
STEPS = "train.steps=30"  # in more steps, rounding errors exceed 1e-6


def begin(folder: Path, *more: str) -> "subprocess.Popen[str]":
    """Start two ranks with devices, and return once step 6 is done."""
    args = [FP32, f"train.run_dir={folder / 'run'}", "launch.device=cuda", *more]
    process = subprocess.Popen(
        command("train", *run_args(folder, 2, *args)), cwd=folder, env=environment(folder),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    wait_for(has_stepped(folder, 6))
    return process


def goes_on(process: "subprocess.Popen[str]", folder: Path, reason: str) -> None:
    out, _ = process.communicate(timeout=180)
    assert (process.returncode, reason in out) == (0, True), out
    train(folder, "cpu", "cpu", STEPS)
    assert_close(folder / "run", folder / "cpu")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_a_run_that_was_ended_goes_on(tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = begin(tmp_path, "train.steps=200")
    ranks = _workers(process)
    process.send_signal(number)
    out, _ = process.communicate(timeout=90)
    assert process.returncode == code, out
    psutil.wait_procs(ranks, timeout=20)
    last = f"train.steps={figures(tmp_path / 'run')[-1][0] + 3}"
    train(tmp_path, "run", "cuda", last)
    train(tmp_path, "cpu", "cpu", last)
    assert_close(tmp_path / "run", tmp_path / "cpu")


def test_a_rank_that_is_killed_is_started_again(tmp_path: Path) -> None:
    process = begin(tmp_path, STEPS, "launch.max_restarts=1")
    _workers(process)[1].kill()
    goes_on(process, tmp_path, "killed by signal 9 (SIGKILL); 2 ranks resume at step ")


def test_a_rank_that_stands_still_is_named_and_started_again(tmp_path: Path) -> None:
    process = begin(tmp_path, STEPS, "launch.max_restarts=1", "launch.hang_timeout=6")
    _workers(process)[0].send_signal(signal.SIGSTOP)
    goes_on(process, tmp_path, "no progress for more than launch.hang_timeout=6 s: rank 0")


def test_hosts_with_a_device_each_have_the_losses_of_cpu_ranks(tmp_path: Path) -> None:
    args = [FP32, "train.steps=8", f"train.run_dir={tmp_path / 'run'}", "launch.device=cuda"]
    with hosts(2) as machines:
        nodes = ["launch.nnodes=2", f"launch.rdzv_endpoint={machines.addresses[0]}:29500"]
        typed = run_args(tmp_path, 1, *args, *nodes)
        env = environment(tmp_path, devices=1)
        started = [
            machines.start(host, "train", *typed, f"launch.node_rank={host}", cwd=tmp_path, env=env)
            for host in range(2)
        ]
        ends = list(map(ended, started))
    assert [code for code, _ in ends] == [0, 0], ends
    assert not (tmp_path / "problems").exists(), (tmp_path / "problems").read_text()
    train(tmp_path, "cpu", "cpu")
    assert_close(tmp_path / "run", tmp_path / "cpu")
