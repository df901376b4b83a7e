"""The lock of a run directory, and heartbeat.json, whose age shows whether the run is alive.

Note: commands that only read a run do not acquire the lock. While they held it, a launcher could
not start, and some network file systems do not support locks.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import psutil
from msgspec import Meta

from fsdpctl.errors import UsageError
from fsdpctl.io import files
from fsdpctl.io.files import is_same_file, open_nofollow, os_errors_as, read_text_file
from fsdpctl.io.run_files import HEARTBEAT, LOCK
from fsdpctl.io.untrusted import Count, read_json

INTERVAL_S = 5.0
RUNNING, DONE, STOPPED, FAILED = "running", "ended", "stopped", "failed"
_MOST_DIGITS = 9  # digits of a process id
_MOST_SECONDS = 1e11  # three thousand years
Seconds = Annotated[float, Meta(ge=0, le=_MOST_SECONDS)]
Pid = Annotated[int, Meta(ge=1, lt=10**_MOST_DIGITS)]
_LONGEST_CAUSE = 2000  # characters
_EXPIRES = 18 * INTERVAL_S  # seconds; a network file system may show a file that is a minute old
_WIND_DOWN_SECONDS = 10.0  # time in which the ranks of a killed launcher exit


@dataclass(frozen=True, slots=True)
class HeartbeatRecord:
    """The contents of heartbeat.json."""

    host: str
    pid: Pid  # process of rank 0
    time: Seconds  # when this was written, since the epoch
    state: str = RUNNING
    message: str = ""  # why the run stopped before its last step
    step: Count | None = None  # steps completed; None before the first
    seconds_per_step: Seconds | None = None  # including everything between steps
    cause: str = ""  # the failure that the launcher found
    namespace: str = ""  # namespace of process ids; empty if the system has none

    @property
    def age(self) -> float:
        return max(0.0, time.time() - self.time)

    @property
    def is_alive(self) -> bool:
        """Whether the run is still running, judged by the age of the heartbeat."""
        return self.state == RUNNING and self.age < _EXPIRES


def read_heartbeat(run_dir: Path) -> HeartbeatRecord | None:
    """Read the newest heartbeat; None if the run has none, UsageError if it is corrupted."""
    path = run_dir / HEARTBEAT
    return read_json(path, HeartbeatRecord) if os.path.lexists(path) else None


def pid_namespace() -> str:
    """Return the name of this process's namespace of process ids, or an empty string."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def was_killed(run_dir: Path, record: HeartbeatRecord) -> bool:
    """Return whether rank 0 and its launcher have exited without writing the final state.

    Returns False on other hosts and in other containers, where this is unknown.
    """
    local = socket.gethostname(), pid_namespace()
    if record.state != RUNNING or (record.host, record.namespace) != local or not all(local):
        return False
    launcher = ""
    with contextlib.suppress(UsageError):
        launcher = read_text_file(run_dir / LOCK)[:_MOST_DIGITS]
    pids = [record.pid, *([int(launcher)] if launcher.isdecimal() else [])]
    return not any(_is_same_process(pid, record.time) for pid in pids)


def check_not_running(run_dir: Path) -> None:
    """Raise UsageError if the run is running, judged by its heartbeat, which any host can read."""
    record = read_heartbeat(run_dir)
    if record is not None and record.is_alive and not was_killed(run_dir, record):
        process = f"{record.host} (process {record.pid})"
        raise UsageError(f"train.run_dir={run_dir}: in use by a run on {process}")


def _is_same_process(pid: int, wrote_at: float) -> bool:
    """Return whether `pid` is the process that wrote then, not a later one with the same id."""
    try:
        process = psutil.Process(pid)
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        return not is_zombie and process.create_time() < wrote_at + INTERVAL_S
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def record_cause(run_dir: Path, cause: str) -> None:
    """Add the cause of a failure to the last heartbeat, if rank 0 was on this host."""
    with contextlib.suppress(OSError, UsageError):  # the command prints the failure in any case
        record = read_heartbeat(run_dir)
        if record is not None and record.host == socket.gethostname():
            record = replace(record, state=FAILED, cause=cause[:_LONGEST_CAUSE])
            files.write_atomic(run_dir / HEARTBEAT, json.dumps(asdict(record)) + "\n")


class RunLock:
    """The lock file of a run, held until the launcher and all its workers have exited."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOCK
        self._file = open_nofollow(self._path, "ab+")

    def acquire(self, on_wait: Callable[[], None]) -> None:
        """Lock the run directory for this launcher.

        If processes of a killed launcher remain, call `on_wait()` and wait for them to exit.
        UsageError if another launcher is alive, or a process of a killed one does not exit.
        """
        deadline, has_called = time.monotonic() + _WIND_DOWN_SECONDS, False
        while not self._try(fcntl.LOCK_EX):
            self._file.seek(0)
            text = self._file.read(_MOST_DIGITS).strip()
            launcher = int(text) if text.isdigit() else -1
            file = os.fstat(self._file.fileno())
            holders = [x for x in psutil.pids() if x != os.getpid() and _has_open(x, file)]
            # Without access to the processes that hold the lock, the number in the file decides.
            is_alive = launcher in holders if holders else psutil.pid_exists(launcher)
            if is_alive or time.monotonic() > deadline:
                problem = "in use by a process of another user, host or container"
                if is_alive:
                    problem = f"in use by a running launcher (process {launcher})"
                elif holders:
                    kill = f"kill -9 {' '.join(map(str, holders))}"
                    problem = f"in use by an earlier launcher's processes; run `{kill}`"
                raise UsageError(f"train.run_dir={self._path.parent}: {problem}")
            if not has_called:
                on_wait()
                has_called = True
            time.sleep(0.2)
        self._file.truncate(0)
        self._file.write(str(os.getpid()).encode())
        self._file.flush()
        # Shared, so that workers join. The conversion is not atomic: another launcher may win.
        if not self._try(fcntl.LOCK_SH):
            raise UsageError(f"train.run_dir={self._path.parent}: in use by a running launcher")

    def join(self) -> None:
        """Share the lock of the launcher, as one of its workers."""
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def release(self) -> None:
        """Unlock the run; the file remains."""
        self._file.close()

    @property
    def is_current(self) -> bool:
        """Whether the directory still has this file: a launcher that fails to start deletes it."""
        return is_same_file(self._path, self._file)

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _has_open(pid: int, file: os.stat_result) -> bool:
    with contextlib.suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # the process may have closed it meanwhile
                if os.path.samestat(each.stat(), file):
                    return True
    return False


def lock_run_dir(run_dir: Path, on_wait: Callable[[], None] = lambda: None) -> RunLock:
    """Create the directory if it does not exist, and lock it.

    Calls `on_wait` before waiting for the ranks of a killed launcher. UsageError if the directory
    is not writable, full or in use.
    """
    with os_errors_as(f"train.run_dir={run_dir}"):
        while True:  # again if a launcher that failed deleted the file before it was locked
            run_dir.mkdir(parents=True, exist_ok=True)
            lock = RunLock(run_dir)
            try:
                lock.acquire(on_wait)
            except BaseException:
                lock.release()
                raise
            if lock.is_current:
                return lock
            lock.release()


@contextlib.contextmanager
def locked_unless_error(run_dir: Path, on_wait: Callable[[], None]) -> Iterator[RunLock]:
    """Lock a run directory, and keep it locked after the block.

    An exception in the block unlocks it, and removes empty directories that this call created.
    """
    created = [each for each in (run_dir, *run_dir.parents) if not each.exists()]
    lock = lock_run_dir(run_dir, on_wait)
    try:
        yield lock
    except BaseException:
        with contextlib.suppress(OSError):
            if os.listdir(run_dir) == [LOCK]:
                (run_dir / LOCK).unlink()
            for folder in created:
                folder.rmdir()
        lock.release()
        raise
