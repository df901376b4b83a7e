"""Who may write to a run directory."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from fsdpctl.errors import UsageError
from fsdpctl.run.files import LOCK

_WIND_DOWN_SECONDS = 10.0  # the ranks of a launcher that was killed go within it


class RunLock:
    """Held by a launcher and its workers; gone when the last of them is."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOCK
        self._file = self._path.open("a+")

    def acquire(self, on_wait: Callable[[], None]) -> None:
        """Become the only launcher of the run.

        What is left of a launcher that was killed is waited for, after `on_wait()` was called.

        Raises:
            UsageError: another launcher is alive, or a rank of one does not go.
        """
        deadline = time.monotonic() + _WIND_DOWN_SECONDS
        said = False
        while not self._try(fcntl.LOCK_EX):
            self._file.seek(0)
            text = self._file.read().strip()
            launcher = int(text) if text.isdigit() else -1
            holders = self._holders()
            # Where the kernel does not say who holds it, the launcher's own word must do.
            lives = launcher in holders if holders else psutil.pid_exists(launcher)
            if lives or time.monotonic() > deadline:
                raise UsageError(self._in_use(launcher, holders, lives=lives))
            if not said:
                on_wait()
                said = True
            time.sleep(0.2)
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()
        if not self._try(fcntl.LOCK_SH):
            raise UsageError(f"train.run_dir={self._path.parent}: in use by a living run")

    def join(self) -> None:
        """Hold the lock together with the launcher, as one of its workers."""
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def release(self) -> None:
        """Let go; the file stays."""
        self._file.close()

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _holders(self) -> list[int]:
        """Processes that have the lock file open, but for this one; those that may be looked at."""
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

    def _in_use(self, launcher: int, holders: list[int], *, lives: bool) -> str:
        where = f"train.run_dir={self._path.parent}"
        if lives or not holders:
            return f"{where}: in use by a living run (process {launcher})"
        named = ", ".join(f"{pid} ({_state_of(pid)})" for pid in holders)
        ids = " ".join(map(str, holders))
        return (
            f"{where}: its launcher is gone, but processes of it are not: {named}; "
            f"`kill -9 {ids}` ends them"
        )


def _state_of(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone by now"


def lock_run_dir(run_dir: Path, on_wait: Callable[[], None]) -> RunLock:
    """Make the directory if need be, and lock it; `on_wait()` is called before a wait.

    Raises:
        UsageError: it cannot be written, or a living run uses it.
    """
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
    return lock
