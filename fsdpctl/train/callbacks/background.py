"""Work on each complete checkpoint, one after the other, while training continues."""

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpctl.config.sealed import MANIFEST

_REPORT_INTERVAL = 10.0  # seconds


@dataclass(frozen=True, slots=True)
class HookMessage:
    """The outcome of the work on one checkpoint."""

    step: int
    name: str  # of its values in metrics.jsonl
    outcome: str  # done, failed, timed out, skipped
    seconds: float = 0.0
    message: str = ""  # the cause of a failure

    @property
    def line(self) -> str:
        """The message to print, if any."""
        return f"step {self.step}: {self.message}" if self.message else ""

    def to_line(self) -> dict[str, Any]:
        """Return the object for metrics.jsonl."""
        line = {
            "step": self.step,
            self.name: self.outcome,
            f"{self.name}_seconds": round(self.seconds, 6),
        }
        return {**line, "warning": self.message} if self.message else line


class OnEachSave(ABC):
    """The threads that work on complete checkpoints, each after the one before.

    The checkpoint `busy` that one works on must not be deleted: hold `deleting` to delete others.
    One whose turn is still to come may be, so that hanging work cannot fill the disk.
    """

    name: str  # of its values in metrics.jsonl
    key: str  # the setting that asks for it
    waits = math.inf  # seconds after the end of training

    def __init__(self, report: Callable[[HookMessage], None]) -> None:
        """Prepare to work; `report` is called in a thread."""
        self.deleting = threading.Lock()
        self.busy: Path | None = None
        self.latest = 0  # step that was added
        self.newest: HookMessage | None = None
        self.until = math.inf  # when the work must have ended
        self._report = report
        self._last: threading.Thread | None = None

    @property
    @abstractmethod
    def is_on(self) -> bool:
        """Whether there is something to do."""

    def is_superseded(self, step: int) -> bool:
        """Return whether a checkpoint is not worked on because of newer ones."""
        return False

    @abstractmethod
    def run(self, folder: Path, step: int) -> HookMessage:
        """Work on a checkpoint, in a thread."""

    def add(self, folder: Path, step: int, then: Callable[[], None]) -> None:
        """Work on a checkpoint after those before it; `then()` is called afterwards."""
        if self.is_on:
            self.latest = step
            given = (folder.absolute(), step, then, self._last)
            # It lives as long as a command, which the kernel ties to it.
            self._last = threading.Thread(
                target=self._work, args=given, name=self.name, daemon=True
            )
            self._last.start()

    def wait(self, say: Callable[[str], None]) -> None:
        """Wait for the work, at most for `waits` seconds; what could not start by then fails.

        `say` is called regularly with a message.
        """
        thread, began = self._last, time.monotonic()
        self.until = began + self.waits
        while thread is not None and time.monotonic() < self.until:
            thread.join(_REPORT_INTERVAL)
            if not thread.is_alive():
                return
            say(f"waiting for {self.key}: {time.monotonic() - began:.0f} s so far{self.how_far()}")

    def how_far(self) -> str:
        """Return how far the work is, as the end of a message."""
        return ""

    def failed(self, step: int, outcome: str, seconds: float, why: str) -> HookMessage:
        """Return the message about a failure."""
        return HookMessage(step, self.name, outcome, seconds, f"{self.key}: {why}")

    def _work(
        self,
        folder: Path,
        step: int,
        then: Callable[[], None],
        before: threading.Thread | None,
    ) -> None:
        if before is not None:
            before.join()
        with self.deleting:
            self.busy = folder
        if self.is_superseded(step):
            message = HookMessage(step, self.name, "skipped")
        elif (folder / MANIFEST).exists():
            message = self.run(folder, step)
        else:
            message = self.failed(step, "failed", 0.0, "checkpoint deleted before its turn")
        with self.deleting:
            self.busy = None
        with suppress(OSError):
            then()
        self.newest = message
        self._report(message)
