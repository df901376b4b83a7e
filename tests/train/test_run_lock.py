"""Who holds a run, and what is said of it."""

import subprocess
import sys
import time

import psutil
import pytest

from fsdpctl.errors import UsageError
from fsdpctl.run import lock as run_lock
from fsdpctl.run.lock import lock_run_dir

HOLD = (
    "import fcntl, os, sys, time\n"
    "file = open(sys.argv[1], 'a+'); fcntl.flock(file, fcntl.LOCK_SH)\n"
    "if sys.argv[2] == 'launcher': file.truncate(0); file.write(str(os.getpid())); file.flush()\n"
    "print('held', flush=True); time.sleep(60)\n"
)


@pytest.fixture
def hold(tmp_path):
    """Starts a process that holds the lock of `tmp_path`."""
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


def test_a_living_launcher_is_named(tmp_path, hold):
    process = hold("launcher")
    began = time.monotonic()
    with pytest.raises(UsageError, match=rf"in use by a living run \(process {process.pid}\)"):
        lock_run_dir(tmp_path, lambda: None)
    assert time.monotonic() - began < 5


def test_of_a_dead_launcher_the_process_that_is_left_is_named(tmp_path, hold, monkeypatch):
    monkeypatch.setattr(run_lock, "_WIND_DOWN_SECONDS", 0.5)
    (tmp_path / "lock").write_text("1")  # a process that lives, and holds nothing
    process = hold("rank")
    psutil.Process(process.pid).suspend()
    waited = []
    with pytest.raises(UsageError, match=rf"`kill -9 {process.pid}` ends them") as caught:
        lock_run_dir(tmp_path, lambda: waited.append(1))
    assert "(stopped)" in str(caught.value)
    assert waited == [1]


def test_what_is_left_is_waited_for(tmp_path, hold):
    process = hold("rank")
    lock = lock_run_dir(tmp_path, process.kill)
    assert process.poll() is not None
    lock.release()
