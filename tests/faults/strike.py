"""Waits for the moment of a case, and causes its fault."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fsdpctl.checkpoint.run_checkpoints import complete_checkpoints, newest_checkpoint
from fsdpctl.run.metrics import last_step
from tests.faults.cases import STEPS, VALIDATES_EVERY, Case
from tests.faults.running import Run

_SOON = 90.0  # most seconds until the moment, or until the run has ended
_DISK_BYTES = 16 << 20
_STOPPED_SECONDS = 5.0  # for a launcher, which nothing else resumes


def strike(
    case: Case, run: Run, processes: list["subprocess.Popen[str]"], saved: set[str]
) -> tuple[str, ...]:
    """Cause the fault; add the newest complete checkpoint to `saved`; return settings of reruns."""
    if case.kind == "planted":
        return ()
    process = processes[0]
    _await_moment(case, run, process)
    checkpoints = run.run_dir / "checkpoints"
    with contextlib.suppress(OSError):
        saved.update(each.name for each in complete_checkpoints(checkpoints)[-1:])
    if case.kind == "signal":
        _send(case, run, process)
    elif case.kind == "disk":
        _fill(run.run_dir.parent)
    elif case.kind == "cable":
        _cut(run, case.seconds)
    elif case.kind == "host":
        _lose(processes[case.rank])
    elif case.kind == "damage":
        return _damage(case, run, process)
    return ()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a file system at `folder`, with space for a run of the campaign."""
    folder.mkdir(exist_ok=True)
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "none", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def make_room(disk: Path) -> None:
    """Remove the file that fills the disk."""
    (disk / "filler").unlink(missing_ok=True)


def _cut(run: Run, seconds: float) -> None:
    assert run.hosts is not None
    run.hosts.plug(1, is_in=False)
    time.sleep(seconds)
    run.hosts.plug(1, is_in=True)


def _lose(launcher: "subprocess.Popen[str]") -> None:
    """Kill all processes of a host at once."""
    with contextlib.suppress(psutil.Error):
        result = psutil.Process(launcher.pid)
        for each in [*result.children(recursive=True), result]:
            with contextlib.suppress(psutil.Error):
                each.kill()


def _fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(1 << 16)):
            pass


def _await_moment(case: Case, run: Run, process: "subprocess.Popen[str]") -> None:
    if case.moment == "start-up":
        time.sleep(case.seconds)
        return
    metrics, checkpoints = run.run_dir / "metrics.jsonl", run.run_dir / "checkpoints"

    def steps() -> int:
        return last_step(metrics)

    def is_saving() -> bool:
        with contextlib.suppress(OSError):
            return any(".tmp" in each.name for each in checkpoints.iterdir())
        return False

    until: dict[str, Callable[[], bool]] = {
        "first step": lambda: steps() >= 1, "training": lambda: steps() >= case.step,
        "validation": lambda: steps() >= VALIDATES_EVERY, "save": is_saving,
        "last save": lambda: steps() >= STEPS - 1,
    }  # fmt: skip
    deadline = time.monotonic() + _SOON
    while not until[case.moment]() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)


def _send(case: Case, run: Run, process: "subprocess.Popen[str]") -> None:
    if case.target == "launcher":
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(case.number)
            if case.what == "SIGSTOP":
                time.sleep(_STOPPED_SECONDS)
                process.send_signal(signal.SIGCONT)
        return
    for each in run.workers():
        with contextlib.suppress(psutil.Error):
            if each.environ().get("RANK") == str(case.rank):
                each.send_signal(case.number)


def _damage(case: Case, run: Run, process: "subprocess.Popen[str]") -> tuple[str, ...]:
    """Stop the run and damage its files, or return other settings for its next start."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_SOON)
    if case.what == "other ranks":
        return ("launch.nproc_per_node=1",)
    newest = newest_checkpoint(run.run_dir / "checkpoints")
    if newest is None:
        return ()
    if case.what == "newest checkpoint":
        _flip_a_byte(sorted(newest.glob("*.safetensors"))[-1])
    else:
        _tear(run.run_dir / "metrics.jsonl")
    return ()


def _flip_a_byte(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-3, os.SEEK_END)
        byte = opened.read(1)
        opened.seek(-3, os.SEEK_END)
        opened.write(bytes([byte[0] ^ 1]))


def _tear(file: Path) -> None:
    """Cut the last line, as a machine that loses power may do."""
    os.truncate(file, file.stat().st_size - 7)
