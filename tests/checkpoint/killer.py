"""Kill this process at its n-th event in a directory."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

_CHANGES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink")
_EVERY_WRITE = 16  # writes per counted event: each tensor has a write


class Killer:
    """A counter of events below `folder` (opened, written, synced …) that kills the process.

    If `point` is even, it is killed before event `point // 2`, else after it or halfway a write.
    """

    def __init__(self, folder: Path, point: int) -> None:
        self._folder = str(folder)
        self._left = point // 2
        self._after = bool(point % 2)
        self._is_due = False
        self._writes = 0
        self._write, self._fsync = os.write, os.fsync
        sys.addaudithook(self._audit)
        os.write = self._written
        os.fsync = self._synced  # type: ignore[assignment]  # takes descriptors only

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_due:  # the operation of the due event has completed
            self._die()
        if event in _CHANGES and str(arguments[0]).startswith(self._folder):
            self._count()

    def _count(self) -> bool:
        """Return whether to kill the process after this event; kill it now if `point` is even."""
        self._left -= 1
        if self._left != -1:
            return False
        if not self._after:
            self._die()
        self._is_due = True
        return True

    def _written(self, descriptor: int, data: Any) -> int:
        if not self._concerns(descriptor):
            return self._write(descriptor, data)
        if self._is_due:
            self._die()
        self._writes += 1
        if self._writes % _EVERY_WRITE == 1 and self._count():
            self._write(descriptor, memoryview(data)[: len(data) // 2])
            self._die()
        return self._write(descriptor, data)

    def _synced(self, descriptor: int) -> None:
        if self._is_due:
            self._die()
        is_now = self._count()
        self._fsync(descriptor)
        if is_now:
            self._die()

    def _die(self) -> None:
        self._is_due = False  # os.kill is an audit event, too
        os.kill(os.getpid(), signal.SIGKILL)

    def _concerns(self, descriptor: int) -> bool:
        try:
            return os.readlink(f"/proc/self/fd/{descriptor}").startswith(self._folder)
        except OSError:
            return False
