"""The launcher restarts failed and remaining ranks from the newest checkpoint."""

import contextlib
import signal
import socket
import subprocess
import time

import psutil
import pytest

from fsdpctl.run.environment import read_start_events
from fsdpctl.run.metrics import last_step
from tests.commands.run import figures
from tests.commands.test_interruptions import ended, has_stepped, start, wait_for
from tests.launch.hosts import hosts
from tests.launch.test_nodes import _start, alone

pytestmark = pytest.mark.slow
_SECONDS = 180
SIZE = "train.global_batch_size=12"  # two and three ranks divide it


def _workers(launcher: "subprocess.Popen[str]") -> list[psutil.Process]:
    results = []
    for each in psutil.Process(launcher.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            if "fsdpctl.training.worker" in each.cmdline():
                results.append(each)
    return results


def test_a_killed_rank_costs_only_steps(tmp_path):
    started = start(tmp_path, 120, SIZE, "launch.max_restarts=2")
    wait_for(has_stepped(tmp_path, 30))
    _workers(started)[1].kill()
    code, out = ended(started)
    assert (code, "restart 1 of 2: rank 1" in out) == (0, True), out
    assert "killed by signal 9 (SIGKILL); 2 ranks resume at step 25" in out
    assert (tmp_path / "run" / "logs" / "restart-1").is_dir()
    whole = alone(tmp_path, 2, "train.steps=120")
    assert sorted(figures(tmp_path / "run"), key=str) == sorted(whole, key=str)
    (restart,) = [each.restart for each in read_start_events(tmp_path / "run") if each.restart]
    assert (restart.number, restart.step) == (1, 26)
    assert restart.lost_steps >= 5
    assert 0 < restart.seconds_to_next_step < _SECONDS
    assert "killed by signal 9" in restart.reason


def test_a_hung_rank_is_named_and_restarted(tmp_path):
    started = start(tmp_path, 60, SIZE, "launch.max_restarts=1", "launch.hang_timeout=6")
    wait_for(has_stepped(tmp_path, 2))
    _workers(started)[0].send_signal(signal.SIGSTOP)
    code, out = ended(started)
    assert code == 0, out
    assert "restart 1 of 1: no progress for more than launch.hang_timeout=6 s: rank 0" in out
    assert "stopped by a signal" in out
    stacks = (tmp_path / "run" / "logs" / "restart-1" / "rank-00001.log").read_text()
    assert "fsdpctl/training/trainer.py" in stacks  # in which rank 1 waited


def test_an_invalid_configuration_is_not_restarted(tmp_path):
    code, out = ended(start(tmp_path, 60, SIZE, "optimizer.lr=1e30", "launch.max_restarts=3"))
    assert (code, "restart" in out) == (76, False), out


def test_a_restart_without_progress_uses_fewer_ranks(tmp_path):
    more = [SIZE, "launch.max_restarts=3", "launch.nproc_per_node=2", "launch.nproc_min=1"]
    started = start(tmp_path, 80, *more)
    wait_for(has_stepped(tmp_path, 30))
    seen: set[int] = set()
    deadline = time.monotonic() + _SECONDS
    while len(seen) < 2:  # kill rank 1 in the first round and at the start of the second
        assert time.monotonic() < deadline
        for each in _workers(started)[1:]:
            if each.pid not in seen:
                seen.add(each.pid)
                each.kill()
        time.sleep(0.05)
    code, out = ended(started)
    assert (code, "restart 2 of 3" in out) == (0, True), out
    assert "1 ranks resume at step 25" in out
    assert "changed launch.nproc_per_node was 2, is 1" in out
    assert last_step(tmp_path / "run" / "metrics.jsonl") == 80
    _, out = ended(start(tmp_path, 81, *more))
    changed = [line for line in out.splitlines() if line.startswith("changed")]
    assert changed == ["changed train.steps was 80, is 81"]


def test_a_run_continues_without_a_lost_node(tmp_path):
    with hosts(3) as machines:
        started = _start(
            machines, tmp_path, "launch.nproc_per_node=1", "train.steps=300",
            "launch.max_restarts=1", "launch.nnodes_min=2",
        )  # fmt: skip
        wait_for(has_stepped(tmp_path, 30))
        for each in [*psutil.Process(started[1].pid).children(), psutil.Process(started[1].pid)]:
            each.kill()
        ends = list(map(ended, started))
    assert [ends[0][0], ends[2][0]] == [0, 0], ends
    lost = f"restart 1 of 1: node 1 on {socket.gethostname()} is unreachable; 2 ranks resume at"
    assert f"{lost} step 25" in ends[0][1]
    assert last_step(tmp_path / "run" / "metrics.jsonl") == 300
