"""heartbeat.json, which rank 0 writes every few seconds, and whether a run is alive by it.

Note: the run's lock is not tried. Taking it, however briefly, may keep a launcher from starting,
and not every network file system supports it. A launcher and its ranks keep the lock file open,
which the kernel shows for processes of the same user.
"""

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from fsdpctl.errors import UsageError
from fsdpctl.io.documents import read_json
from fsdpctl.io.files import read_regular
from fsdpctl.run.files import HEARTBEAT, LOCK, replace_text

INTERVAL = 5.0  # seconds
RUNNING, ENDED, STOPPED, FAILED = "running", "ended", "stopped", "failed"
_MOST_BYTES = 1 << 16
_LONGEST = 2000  # characters of a message
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


class Heartbeat:
    """A thread that writes heartbeat.json until the process ends, whatever training waits for.

    A failure to write is ignored: readers then see the age of the last heartbeat.
    """

    def __init__(self, run_dir: Path, every: float = INTERVAL) -> None:
        """Write the first heartbeat and start the thread."""
        self._path = run_dir / HEARTBEAT
        now = time.time()
        pid, namespace = os.getpid(), pid_namespace()
        self._record = HeartbeatRecord(socket.gethostname(), pid, namespace, now, now)
        self._first: tuple[int, float] | None = None  # the first step, and when it was completed
        self._every = every
        self._has_ended = threading.Event()
        self._writing = threading.Lock()
        self._write()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def step(self, step: int) -> None:
        """Record the number of completed steps."""
        now = time.monotonic()
        is_first = self._first is None
        if self._first is None:
            self._first = step, now
        first, began = self._first
        each = (now - began) / (step - first) if step > first else None
        self._record = replace(self._record, step=step, seconds_per_step=each)
        if is_first:  # readers shall see at once that the run is no longer starting
            self._write()

    def go_back(self, step: int) -> None:
        """Record that the run resumed from `step`, and measure the time per step again."""
        self._first = None
        self.step(step)

    def end(self, state: str, message: str = "") -> None:
        """Write the last heartbeat."""
        self._has_ended.set()
        self._record = replace(self._record, state=state, message=message[:_LONGEST])
        self._write()

    def _run(self) -> None:
        while not self._has_ended.wait(self._every):
            self._write()

    def _write(self) -> None:
        with self._writing, contextlib.suppress(OSError):
            record = replace(self._record, time=time.time())
            replace_text(self._path, json.dumps(asdict(record)) + "\n")


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
