"""The lock of a run directory, and the errors about its holders."""

import errno
import os
import subprocess
import sys
import time

import psutil
import pytest

from fsdpctl.errors import UsageError
from fsdpctl.run import heartbeat as run_lock
from fsdpctl.run.heartbeat import RunLock, lock_run_dir, locked_unless_error

HOLD = (
    "import fcntl, os, sys, time\n"
    "file = open(sys.argv[1], 'a+'); fcntl.flock(file, fcntl.LOCK_SH)\n"
    "if sys.argv[2] == 'launcher': file.truncate(0); file.write(str(os.getpid())); file.flush()\n"
    "print('held', flush=True); time.sleep(60)\n"
)


@pytest.fixture
def hold(tmp_path):
    """Start a process that holds the lock of `tmp_path`."""
    processes = []

    def start(role):
        command = [sys.executable, "-c", HOLD, str(tmp_path / "lock"), role]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_running_launcher_is_named(tmp_path, hold):
    process = hold("launcher")
    began = time.monotonic()
    with pytest.raises(UsageError, match=rf"by a running launcher \(process {process.pid}\)"):
        lock_run_dir(tmp_path)
    assert time.monotonic() - began < 5


def test_the_remaining_process_of_a_killed_launcher_is_named(tmp_path, hold, monkeypatch):
    monkeypatch.setattr(run_lock, "_WIND_DOWN_SECONDS", 0.5)
    (tmp_path / "lock").write_text("1")  # a live process that holds no lock
    process = hold("rank")
    psutil.Process(process.pid).suspend()
    waited = []
    with pytest.raises(UsageError, match=rf"run `kill -9 {process.pid}`"):
        lock_run_dir(tmp_path, lambda: waited.append(1))
    assert waited == [1]


def test_remaining_processes_are_waited_for(tmp_path, hold):
    process = hold("rank")
    lock = lock_run_dir(tmp_path, process.kill)
    assert process.poll() is not None
    lock.release()


def test_a_lock_file_that_its_holder_has_removed_locks_nothing(tmp_path, monkeypatch):
    """A launcher that opened the file before its holder removed it locks a new file."""
    run_dir = tmp_path / "run"
    opened = RunLock.__init__

    def open_and_lose(self, path):
        opened(self, path)
        monkeypatch.setattr(RunLock, "__init__", opened)
        (path / "lock").unlink()

    monkeypatch.setattr(RunLock, "__init__", open_and_lose)
    lock = lock_run_dir(run_dir)
    assert lock.is_current
    with pytest.raises(UsageError, match="in use"):
        lock_run_dir(run_dir)
    lock.release()


def test_a_claim_removes_only_what_it_has_made(tmp_path):
    foreign = tmp_path / "kept"
    foreign.mkdir()
    for run_dir, file in ((foreign, None), (tmp_path / "a" / "b", None), (tmp_path / "c", "log")):
        with pytest.raises(KeyboardInterrupt):
            _interrupted(run_dir, file)
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["c", "kept", "lock", "log"]
    with locked_unless_error(foreign, lambda: None) as lock:
        pass
    with pytest.raises(UsageError, match="in use"):
        lock_run_dir(foreign)
    lock.release()


def _interrupted(run_dir, file):
    with locked_unless_error(run_dir, lambda: None):
        if file:
            (run_dir / file).touch()
        raise KeyboardInterrupt


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(lock, on_wait):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RunLock, "acquire", full)
    with pytest.raises(UsageError, match=f"train.run_dir={tmp_path}: No space left"):
        lock_run_dir(tmp_path)
