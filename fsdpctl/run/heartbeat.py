"""heartbeat.json, which rank 0 writes every few seconds, and the liveness of a run by it.

Note: the run's lock is not tried. Taking it, however briefly, may keep a launcher from starting,
and not every network file system supports it. A launcher and its ranks keep the lock file open,
which the kernel shows for processes of the same user.
"""

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from fsdpctl.errors import UsageError
from fsdpctl.io.documents import read_json
from fsdpctl.io.files import read_regular
from fsdpctl.run.files import HEARTBEAT, LOCK

INTERVAL = 5.0  # seconds
RUNNING, ENDED, STOPPED, FAILED = "running", "ended", "stopped", "failed"
_MOST_BYTES = 1 << 16
_EXPIRES = 18 * INTERVAL  # seconds; a network file system may show the file of a minute ago
_CLOCK_SKEW = 2.0  # seconds between the start of a process and the time that it recorded for it


@dataclass(frozen=True, slots=True)
class HeartbeatRecord:
    """The contents of heartbeat.json."""

    host: str
    pid: int  # of rank 0
    namespace: int  # of process ids, as the kernel numbers it: containers have their own
    began: float  # seconds since the epoch, as `time`
    time: float  # when this was written
    state: str = RUNNING
    message: str = ""  # why the run ended, unless it is complete
    step: int | None = None  # steps completed; None before the first
    seconds_per_step: float | None = None  # including everything between steps

    @property
    def is_of_this_host(self) -> bool:
        """Whether this host would show the process."""
        return (self.host, self.namespace) == (socket.gethostname(), pid_namespace())


def pid_namespace() -> int:
    """Return the id of this process's PID namespace, or 0 if unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def read_heartbeat(run_dir: Path) -> HeartbeatRecord | None:
    """Read the newest heartbeat, or return None if the run has none.

    Raises:
        UsageError: If the file is corrupted.
    """
    path = run_dir / HEARTBEAT
    if not os.path.lexists(path):
        return None
    return read_json(path, HeartbeatRecord, most_bytes=_MOST_BYTES)


@dataclass(frozen=True, slots=True)
class Liveness:
    """Whether a run is alive, and the evidence."""

    is_alive: bool
    source: Literal["process", "heartbeat", "nothing"]
    pid: int | None = None  # of the process found, or the one that the heartbeat names
    heartbeat_age: float | None = None  # seconds


def liveness(run_dir: Path, record: HeartbeatRecord | None, now: float | None = None) -> Liveness:
    """Return whether the run in `run_dir` with this heartbeat is alive. Writes nothing."""
    age = None if record is None else max(0.0, (now or time.time()) - record.time)
    for pid in _candidates(run_dir, record):
        if _has_open(pid, run_dir / LOCK):
            return Liveness(True, "process", pid, age)
    if record is None or age is None or record.state != RUNNING:
        return Liveness(False, "nothing", None, age)
    if record.is_of_this_host:
        is_alive = _is_running(record)
        return Liveness(is_alive, "process" if is_alive else "nothing", record.pid, age)
    is_alive = age < _EXPIRES
    return Liveness(is_alive, "heartbeat" if is_alive else "nothing", record.pid, age)


def _candidates(run_dir: Path, record: HeartbeatRecord | None) -> list[int]:
    """Return the ids of the launcher, which the lock names, and of rank 0."""
    found = [] if record is None or not record.is_of_this_host else [record.pid]
    try:
        text = read_regular(run_dir / LOCK, 32).decode("ascii", "replace").strip()
    except UsageError:
        return found
    return [int(text), *found] if text.isdigit() else found


def _has_open(pid: int, path: Path) -> bool:
    """Return whether a process has a file open; False if that cannot be determined."""
    try:
        wanted = path.stat()
        folder = f"/proc/{pid}/fd"
        return any(_is_same(f"{folder}/{name}", wanted) for name in os.listdir(folder))
    except OSError:
        return False


def _is_same(descriptor: str, wanted: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(descriptor), wanted)
    except OSError:
        return False


def _is_running(record: HeartbeatRecord) -> bool:
    """Return whether rank 0 is running: a later process may have got its id."""
    try:
        process = psutil.Process(record.pid)
        is_same = process.create_time() <= record.began + _CLOCK_SKEW
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
