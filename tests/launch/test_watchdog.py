"""Hung ranks: the one that others wait for, and the report."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdpctl.comm.flight_recorder import read_record
from fsdpctl.comm.rank_status import (
    DRAWING,
    PAGE_BYTES,
    READING,
    HostPages,
    RankStatus,
    RankStatusPage,
    make_status_file,
)
from fsdpctl.config.launch import LaunchConfig
from fsdpctl.launch.diagnosis import RankState, blamed_ranks, describe_hang
from fsdpctl.launch.outcome import count_oom_kills
from fsdpctl.launch.watchdog import Watchdog
from tests.distributed import distributed

LAUNCH = LaunchConfig(nproc_per_node=2, hang_timeout=1)


def state(rank: int, **changes: object) -> RankState:
    fields: dict[str, object] = {
        "process_state": "S", "silent_seconds": 9.0, "step": 3, "phase": "reduce blocks.1",
        "is_waiting": True,
    }  # fmt: skip
    return RankState(rank, "host", **{**fields, **changes})  # type: ignore[arg-type]


def test_a_launcher_reads_the_heartbeats_of_its_ranks(tmp_path):
    path = make_status_file(3, tmp_path)
    pulse = RankStatusPage()
    pulse.at("nowhere")  # written before the page is open
    pulse.open(path, 1)
    pulse.at("forward blocks.3", 7)
    pulse.mark_waiting(begins=True)
    first, second, third = HostPages(path).statuses()
    assert (second.count, second.step, second.phase, second.is_waiting) == (
        2, 7, "forward blocks.3", True,
    )  # fmt: skip
    assert first.count == third.count == 0
    assert first.step is None


def test_long_places_stay_on_their_page(tmp_path):
    path = make_status_file(2, tmp_path)
    pulse = RankStatusPage()
    pulse.open(path, 0)
    pulse.at("ä" * PAGE_BYTES)
    first, second = HostPages(path).statuses()
    assert first.phase.startswith("ää")
    assert second.count == 0


GROUPS = [{"world": 5, "a": 2}, {"world": 5, "a": 2}, {"world": 4, "b": 7}]
EXITED, STOPPED = {"process_state": ""}, {"process_state": "T"}
BUSY, UNRESPONSIVE = {"is_waiting": False}, {"is_responsive": False}


def started(**counts: int) -> dict[str, object]:
    return {"started_collectives": counts}


@pytest.mark.parametrize(("changes", "blamed"), [
    ([{}, STOPPED, started(world=1)], [1]),
    ([started(**each) for each in GROUPS], [2]),
    ([{}, BUSY, {}], [1]), ([{}, {}], []),
    ([started(world=4), {**BUSY, **UNRESPONSIVE}, {}, UNRESPONSIVE], [1]),
    ([EXITED, {}], [0]), ([{**EXITED, **BUSY}, BUSY], []),  # finished
])  # fmt: skip
def test_ranks_that_others_wait_for(changes: list[dict[str, object]], blamed: list[int]) -> None:
    assert blamed_ranks([state(rank, **each) for rank, each in enumerate(changes)]) == blamed


def test_a_report_names_rank_step_place_and_collective():
    message = describe_hang(
        [state(0), state(1, is_waiting=False, pending="gloo:all_reduce of 4 in world")], 30
    )
    assert "hang_timeout=30 s: rank 1 on host: step 3, reduce blocks.1" in message
    assert "gloo:all_reduce of 4 in world" in message
    assert message.endswith("for 9 s; rank 0 waits in reduce blocks.1, step 3")
    message = describe_hang(
        [state(0), state(1, is_waiting=False), state(2)], 32, before_first_step=True
    )
    assert "for more than 32 s before its first step" in message
    assert "; 2 ranks wait, rank 0 in" in message


def _sleeper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def _watched(folder: Path, processes: list["subprocess.Popen[bytes]"], beats: int) -> Watchdog:
    path = make_status_file(LAUNCH.nproc_per_node or 0, folder)
    watch = Watchdog(path, LAUNCH, pids=lambda: {n: each.pid for n, each in enumerate(processes)})
    for index in range(beats):
        pulse = RankStatusPage()
        pulse.open(path, index)
        pulse.at("forward blocks.0", 1)
        pulse.mark_waiting(begins=index == 0)
    return watch


def test_hung_ranks_are_named_and_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("fsdpctl.launch.watchdog._REPORT_SECONDS", 0.1)
    processes = [_sleeper(), _sleeper()]
    processes[1].send_signal(signal.SIGSTOP)
    with _watched(tmp_path, processes, beats=2) as watch:
        codes = [each.wait(timeout=20) for each in processes]
    assert "rank 1" in watch.hang
    assert "stopped by a signal" in watch.hang
    # SIGUSR2 asks rank 0 for its stack; a process without a handler ends.
    assert codes == [-signal.SIGUSR2, -signal.SIGKILL]


@pytest.mark.slow
def test_a_page_that_is_being_written_is_not_a_hang(tmp_path, monkeypatch):
    monkeypatch.setattr("fsdpctl.launch.watchdog._POLL_SECONDS", 0.0002)
    beats = (
        "import sys; from pathlib import Path; from fsdpctl.comm import rank_status\n"
        "pulse = rank_status.RankStatusPage(); pulse.open(Path(sys.argv[1]), 0)\n"
        "while True: pulse.at('forward blocks.3', 7)"
    )
    processes = [_sleeper()]
    launch = LaunchConfig(nproc_per_node=1, hang_timeout=2)
    path = make_status_file(1, tmp_path)
    watch = Watchdog(path, launch, pids=lambda: {0: processes[0].pid})
    processes.append(subprocess.Popen([sys.executable, "-c", beats, path]))
    while not HostPages(path).statuses()[0].count:
        time.sleep(0.05)
    with watch:
        time.sleep(3)
        assert processes[0].poll() is None
        for each in processes:
            each.kill()
            each.wait()
    assert watch.hang == ""


@pytest.mark.slow
def test_a_launcher_that_was_suspended_does_not_blame_its_ranks(tmp_path, monkeypatch):
    """A late poll, as after a suspension, counts as at most _LONGEST_POLL seconds."""
    monkeypatch.setattr("fsdpctl.launch.watchdog._POLL_SECONDS", 0.6)
    monkeypatch.setattr("fsdpctl.launch.watchdog._LONGEST_POLL", 0.1)
    processes = [_sleeper(), _sleeper()]
    with _watched(tmp_path, processes, beats=2) as watch:
        time.sleep(2)
        assert [each.poll() for each in processes] == [None, None]
        for each in processes:
            each.kill()
            each.wait()
    assert watch.hang == ""


def test_ranks_that_outlive_a_killed_rank_are_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("fsdpctl.launch.watchdog._GRACE_SECONDS", 0.5)
    processes = [_sleeper(), _sleeper()]
    with _watched(tmp_path, processes, beats=0) as watch:
        processes[0].kill()
        processes[0].wait(timeout=20)
        assert processes[1].wait(timeout=20) == -signal.SIGKILL
    assert watch.hang == ""
    assert watch.failed_at is not None


@pytest.mark.slow
def test_ranks_that_make_progress_are_not_killed(tmp_path, monkeypatch):
    """A rank may complete a checkpoint after another rank has failed."""
    monkeypatch.setattr("fsdpctl.launch.watchdog._GRACE_SECONDS", 0.6)
    processes = [_sleeper(), _sleeper()]
    with _watched(tmp_path, processes, beats=2):
        processes[0].kill()
        processes[0].wait(timeout=20)
        pulse = RankStatusPage()
        pulse.open(next(tmp_path.iterdir()), 1)
        until = time.monotonic() + 2
        while time.monotonic() < until:
            pulse.at("completing a checkpoint", 1)
            time.sleep(0.05)
        assert (processes[1].poll(), processes[1].wait(timeout=20)) == (None, -signal.SIGKILL)


@distributed(world_size=2)
def test_the_recorder_identifies_the_rank_that_is_behind(rank, world_size):
    group = dist.new_group(list(range(world_size)), group_desc="gathers")
    for _ in range(3 - rank):  # rank 1 does not start the last all-reduce
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    result = read_record()
    (count,) = (count for name, count in result.started.items() if name.endswith("gathers"))
    assert count == 3 - rank
    dist.barrier()  # both ranks have read the record
    if rank == 0:
        assert "all_reduce of 2 in" in result.pending
    else:
        dist.all_reduce(torch.ones(2), group=group)
    assert work is not None
    work.wait()
    dist.barrier()


@pytest.mark.parametrize(
    ("line", "file", "count"),
    [("0::/a/b", "a/b/memory.events", 3), ("4:memory:/a", "memory/a/memory.oom_control", 3)],
)  # fmt: skip
def test_out_of_memory_kills_are_counted(tmp_path, line, file, count):
    root = tmp_path / "cgroup"
    (root / file).parent.mkdir(parents=True)
    (root / file).write_text(f"low 0\noom_kill {count}\n")
    (tmp_path / "own").write_text(line + "\n")
    assert count_oom_kills(root, tmp_path / "own") == count


@pytest.mark.parametrize(("phase", "step", "seconds"), [
    ("forward head", 3, 300), ("ready", None, 480), (DRAWING, None, 1200), (READING, None, 1200),
])  # fmt: skip
def test_a_hang_is_named_before_nccl_ends_the_process(tmp_path, phase, step, seconds):
    launch = LaunchConfig(nproc_per_node=1, timeout=600)
    watch = Watchdog(make_status_file(1, tmp_path), launch, pids=dict)
    watch._statuses = [RankStatus(1, step, is_waiting=False, phase=phase)]
    assert watch._limit_of(0) == seconds
