"""Whether a run is alive: the lock of its directory, and heartbeat.json of rank 0.

Note: readers do not try the lock. Taking it, however briefly, may keep a launcher from starting,
and not every network file system supports it. A launcher and its ranks keep the lock file open,
which the kernel shows for processes of the same user.
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
from typing import Annotated, Literal

import psutil
from msgspec import Meta

from fsdpctl.errors import UsageError
from fsdpctl.io import files
from fsdpctl.io.documents import Count, read_json
from fsdpctl.io.files import leads_to, open_own, read_regular, refusing
from fsdpctl.io.run_files import HEARTBEAT, LOCK

INTERVAL = 5.0  # seconds
RUNNING, ENDED, STOPPED, FAILED = "running", "ended", "stopped", "failed"
_MOST_BYTES = 1 << 16
_MOST_DIGITS = 9  # of the id of a process
_MOST_SECONDS = 1e11  # three thousand years
Seconds = Annotated[float, Meta(ge=0, le=_MOST_SECONDS)]
Pid = Annotated[int, Meta(ge=1, lt=10**_MOST_DIGITS)]
_LONGEST_CAUSE = 2000  # characters
_EXPIRES = 18 * INTERVAL  # seconds; a network file system may show the file of a minute ago
_CLOCK_SKEW = 2.0  # seconds between the start of a process and the time that it recorded for it
_WIND_DOWN_SECONDS = 10.0  # in which the ranks of a killed launcher exit


@dataclass(frozen=True, slots=True)
class HeartbeatRecord:
    """The contents of heartbeat.json."""

    host: str
    pid: Pid  # of rank 0
    namespace: int  # of process ids, as the kernel numbers it: containers have their own
    began: Seconds  # since the epoch, as `time`
    time: Seconds  # when this was written
    state: str = RUNNING
    message: str = ""  # why the run ended, unless it is complete
    step: Count | None = None  # steps completed; None before the first
    seconds_per_step: Seconds | None = None  # including everything between steps
    cause: str = ""  # of a failure, as the launcher found it

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


def record_cause(run_dir: Path, cause: str) -> None:
    """Add the cause of a failure to the heartbeat of a run whose ranks have ended on this host."""
    with contextlib.suppress(OSError, UsageError):  # the failure itself is reported in any case
        record = read_heartbeat(run_dir)
        if record is not None and record.is_of_this_host:
            record = replace(record, state=FAILED, cause=cause[:_LONGEST_CAUSE])
            files.replace(run_dir / HEARTBEAT, json.dumps(asdict(record)) + "\n")


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
    with contextlib.suppress(OSError):
        lock = (run_dir / LOCK).stat()
        for pid in _candidates(run_dir, record):
            if _has_open(pid, lock):
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
        text = read_regular(run_dir / LOCK, _MOST_DIGITS).strip()
    except UsageError:
        return found
    return [int(text), *found] if text.isdigit() else found


def _has_open(pid: int, wanted: os.stat_result) -> bool:
    """Return whether a process has a file open; False if that cannot be determined."""
    with contextlib.suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.path.samestat(each.stat(), wanted):
                    return True
    return False


def _is_running(record: HeartbeatRecord) -> bool:
    """Return whether rank 0 is running: a later process may have got its id."""
    try:
        process = psutil.Process(record.pid)
        is_same = process.create_time() <= record.began + _CLOCK_SKEW
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class RunLock:
    """The lock file of a run, held by a launcher and its workers until the last of them exits."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOCK
        self._file = open_own(self._path, "ab+")

    def acquire(self, on_wait: Callable[[], None]) -> None:
        """Lock the run directory for this launcher.

        If processes of a killed launcher remain, call `on_wait()` and wait for them to exit.

        Raises:
            UsageError: If another launcher is alive or one of its ranks does not exit.
        """
        deadline = time.monotonic() + _WIND_DOWN_SECONDS
        has_called = False
        while not self._try(fcntl.LOCK_EX):
            self._file.seek(0)
            text = self._file.read(_MOST_DIGITS).strip()
            launcher = int(text) if text.isdigit() else -1
            holders = self._holders()
            # Without access to the processes that hold it, trust the number in the file.
            is_alive = launcher in holders if holders else psutil.pid_exists(launcher)
            if is_alive or time.monotonic() > deadline:
                raise UsageError(self._in_use(launcher, holders, is_alive=is_alive))
            if not has_called:
                on_wait()
                has_called = True
            time.sleep(0.2)
        self._file.truncate(0)
        self._file.write(str(os.getpid()).encode())
        self._file.flush()
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
        """Whether the file is still in the directory: a launcher that gives up removes its own."""
        return leads_to(self._path, self._file)

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _holders(self) -> list[int]:
        """Return the other processes that have the lock file open, as far as /proc is readable."""
        own = os.fstat(self._file.fileno())
        return [pid for pid in psutil.pids() if pid != os.getpid() and _has_open(pid, own)]

    def _in_use(self, launcher: int, holders: list[int], *, is_alive: bool) -> str:
        where = f"train.run_dir={self._path.parent}"
        if is_alive or not holders:
            return f"{where}: in use by a running launcher (process {launcher})"
        named = ", ".join(f"{pid} ({_state_of(pid)})" for pid in holders)
        ids = " ".join(map(str, holders))
        return (
            f"{where}: in use by processes of an earlier launcher: {named}; to end them, run "
            f"`kill -9 {ids}`"
        )


def _state_of(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "exited"


def lock_run_dir(run_dir: Path, on_wait: Callable[[], None]) -> RunLock:
    """Create the directory if it does not exist, and lock it.

    `on_wait` is called before a wait for the ranks of a killed launcher.

    Raises:
        UsageError: If the directory is not writable, full or in use.
    """
    with refusing(f"train.run_dir={run_dir}"):
        while True:
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
def claimed(run_dir: Path, on_wait: Callable[[], None]) -> Iterator[RunLock]:
    """Lock a run directory, and keep it locked after the block.

    An exception unlocks it, and removes the directory if it was created here and is still empty.

    Raises:
        UsageError: As `lock_run_dir`.
    """
    made = [each for each in (run_dir, *run_dir.parents) if not each.exists()]
    lock = lock_run_dir(run_dir, on_wait)
    try:
        yield lock
    except BaseException:
        with contextlib.suppress(OSError):
            if os.listdir(run_dir) == [LOCK]:
                (run_dir / LOCK).unlink()
            for each in made:
                each.rmdir()
        lock.release()
        raise
