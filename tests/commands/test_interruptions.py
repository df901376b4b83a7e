"""Runs that are interrupted: each ends with the right exit code, or continues and prints so."""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdpctl.commands.status import read_status
from tests.commands.run import command, environment, figures, fsdpctl, run_args

pytestmark = pytest.mark.slow
LONG = 100_000


def reset_signals() -> None:
    """Reset the signals that a shell may have its background jobs ignore."""
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def start(folder: Path, steps: int = LONG, *more: str, **kwargs: Any) -> subprocess.Popen[str]:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **kwargs}
    return subprocess.Popen(
        command("train", *run_args(folder, steps, *more)), cwd=folder, text=True, env=environment(),
        preexec_fn=reset_signals, **streams,
    )  # fmt: skip


def wait_for(what: Callable[[], object], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_stepped(folder: Path, step: int = 30) -> Callable[[], bool]:
    file = folder / "run" / "metrics.jsonl"
    return lambda: file.is_file() and f'"step": {step},' in file.read_text()


def ranks_of(process: "subprocess.Popen[str] | int") -> list[psutil.Process]:
    pid = process if isinstance(process, int) else process.pid
    return psutil.Process(pid).children()


def ended(process: "subprocess.Popen[str]", seconds: float = 240) -> tuple[int, str]:
    out, _ = process.communicate(timeout=seconds)
    return process.returncode, out or ""


def test_a_run_listens_on_the_loopback_interface_only(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # a site may set it for its clusters
    process = start(tmp_path)
    wait_for(has_stepped(tmp_path))
    listening = [
        each.laddr.ip
        for one in (psutil.Process(process.pid), *ranks_of(process))
        for each in one.net_connections()
        if each.status == psutil.CONN_LISTEN
    ]
    process.terminate()
    assert (ended(process)[0], set(listening)) == (75, {"127.0.0.1"})


def test_a_run_whose_output_cannot_be_written_is_complete(tmp_path):
    typed = command("train", *run_args(tmp_path, 30))
    with open("/dev/full", "w") as full:
        done = subprocess.run(typed, cwd=tmp_path, env=environment(), stdout=full)
    assert done.returncode == 1
    assert (figures(tmp_path / "run")[-1][0], read_status(tmp_path / "run").state) == (
        30, "finished"
    )  # fmt: skip


@pytest.mark.parametrize("nohup", [True, False])
def test_a_closed_terminal_does_not_end_a_run_without_saving(tmp_path, nohup):
    typed = command("train", *run_args(tmp_path, 120 if nohup else LONG))
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
        os.chdir(tmp_path)
        os.execvpe(typed[0], typed, environment() | {"TERM": "xterm"})

    def is_read() -> bool:
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 1 << 16)
        return has_stepped(tmp_path)()

    wait_for(is_read)
    os.close(terminal)  # the next write fails with EIO
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (0 if nohup else 75)
    last = figures(tmp_path / "run")[-1][0]
    log = (tmp_path / "run" / "logs" / "node-00000.log").read_text()
    assert "validation loss" in log
    if nohup:
        assert (last, "step 120: validation loss" in log) == (120, True)
    assert (tmp_path / "run" / "checkpoints" / "latest").resolve().name == f"step-{last:08d}"


@pytest.mark.parametrize("way", ["closed", "unread"])
def test_a_closed_output_stops_no_run_and_ctrl_c_saves_and_exits_with_130(tmp_path, way):
    if way == "closed":
        line = " ".join(f"'{arg}'" for arg in command("train", *run_args(tmp_path, LONG)))
        process = subprocess.Popen(
            ["bash", "-c", f"exec {line} 2>&-"], cwd=tmp_path, env=environment(), text=True,
            preexec_fn=reset_signals, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    else:
        process = start(tmp_path)
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
    wait_for(has_stepped(tmp_path))
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    step = figures(tmp_path / "run")[-1][0]
    assert (tmp_path / "run" / "checkpoints" / f"step-{step:08d}").is_dir()


@pytest.mark.parametrize("seconds", [0.08, 0.12, 0.2, 0.3, 0.5, 1.0, 2.0])
def test_ctrl_c_at_the_start_shows_no_traceback(tmp_path, seconds):
    process = start(tmp_path)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    code, out = ended(process)
    assert (code, "Traceback" in out) == (130, False), out


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_after_the_last_save_is_not_a_failure(tmp_path, name):
    process = start(tmp_path, 30)
    last = tmp_path / "run" / "checkpoints" / "step-00000030"
    wait_for(last.exists)
    process.send_signal(signal.Signals[name])
    code, out = ended(process)
    assert (code, "done: run" in out) == (0, True), out


def test_a_suspended_rank_is_killed_with_its_launcher(tmp_path):
    process = start(tmp_path)
    wait_for(has_stepped(tmp_path))
    ranks = ranks_of(process)
    ranks[1].suspend()
    process.kill()
    process.communicate()

    def are_gone() -> bool:
        living = (each for each in ranks if each.is_running())
        return all(each.status() == psutil.STATUS_ZOMBIE for each in living)

    wait_for(are_gone, 5)
    code, out = ended(start(tmp_path, 60))
    assert (code, "resumes at step 25" in out or "resumes at step" in out) == (0, True), out


def test_a_suspended_rank_is_named_and_not_the_rank_that_waits(tmp_path):
    process = start(tmp_path, LONG, "launch.timeout=10", "launch.hang_timeout=99")
    wait_for(has_stepped(tmp_path))
    ranks_of(process)[1].suspend()
    code, out = ended(process, 120)
    assert (code, "ranks timed out waiting for others" in out) == (1, True)
    assert "rank 0 on" not in out


@pytest.mark.parametrize("way", ["deleted", "moved", "without its metrics"])
def test_a_run_whose_directory_is_lost_fails_at_once(tmp_path, way):
    process = start(tmp_path, LONG, "launch.max_restarts=1")
    wait_for(has_stepped(tmp_path))
    run = tmp_path / "run"
    if way == "deleted":
        shutil.rmtree(run, ignore_errors=True)
    elif way == "moved":
        run.rename(tmp_path / "elsewhere")
    else:
        (run / "metrics.jsonl").unlink()
    code, out = ended(process, 30)
    assert code == 1
    out = " ".join(re.sub("[│\n]", " ", out).split())
    assert "deleted or moved during the run" in out
    assert "Traceback" not in out
    keeps = way == "without its metrics"
    assert ("run the same command to resume" in out) == keeps
    assert ("the same command begins again" in out) != keeps
    assert not (run / "metrics.jsonl").exists()


def test_a_full_disk_is_one_panel(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", disk], check=False)
    if mounted.returncode:
        pytest.skip("may not mount")
    try:
        typed = [arg for arg in run_args(tmp_path, 60) if "run_dir" not in arg]
        result = fsdpctl("train", *typed, f"train.run_dir={disk / 'run'}", cwd=tmp_path)
    finally:
        subprocess.run(["umount", disk], check=True)
    assert (result.returncode, "No space left" in result.stderr) == (1, True)
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) < 12


def test_a_low_limit_of_open_files_is_raised_or_rejected(tmp_path):
    line = " ".join(f"'{arg}'" for arg in command("train", *run_args(tmp_path, 5)))
    for limit, code in (("-Sn 40", 0), ("-n 24", 2)):
        result = subprocess.run(
            ["bash", "-c", f"ulimit {limit}; exec {line} --resume never"], cwd=tmp_path,
            env=environment(), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert result.returncode == code, result.stderr
    assert "needs 160 open files, but the limit is 24" in result.stderr
