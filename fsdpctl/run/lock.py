"""The lock of a run directory: one launcher at a time writes to it."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from fsdpctl.errors import UsageError
from fsdpctl.run.files import LOCK

_WIND_DOWN_SECONDS = 10.0  # in which the ranks of a killed launcher exit


class RunLock:
    """The lock file of a run, held by a launcher and its workers until the last of them exits."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOCK
        self._file = self._path.open("a+")

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
            text = self._file.read().strip()
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
        self._file.write(str(os.getpid()))
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
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _holders(self) -> list[int]:
        """Return the other processes that have the lock file open, as far as /proc is readable."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if process.pid != os.getpid() and self._is_open_in(process.pid):
                    found.append(process.pid)
        return found

    def _is_open_in(self, pid: int) -> bool:
        own = os.fstat(self._file.fileno())
        return any(
            os.path.samestat(own, each.stat())
            for each in Path(f"/proc/{pid}/fd").iterdir()
            if each.exists()
        )

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
        UsageError: If the directory is not writable or in use.
    """
    while True:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            lock = RunLock(run_dir)
        except OSError as error:
            raise UsageError(f"train.run_dir={run_dir}: {error.strerror}") from None
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
