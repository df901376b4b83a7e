"""The sign of life that rank 0 gives in alive.json, for those who cannot see its process."""

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fsdpctl.io.documents import read_json
from fsdpctl.run.files import ALIVE, replace_text

BEATS_EVERY = 5.0  # seconds
RUNNING, ENDED, STOPPED, FAILED = "running", "ended", "stopped", "failed"
_MOST_BYTES = 1 << 16
_LONGEST = 2000  # characters of a message


@dataclass(frozen=True, slots=True)
class Sign:
    """What the file says."""

    host: str
    pid: int  # of rank 0
    namespace: int  # of process ids, as the kernel numbers it: containers have their own
    began: float  # seconds since the epoch, as `time`
    time: float  # when this was written
    state: str = RUNNING
    message: str = ""  # how it ended, if not well
    step: int | None = None  # steps done, once it steps
    seconds_per_step: float | None = None  # with all that was done between them

    @property
    def is_of_this_host(self) -> bool:
        """Whether its process would be seen from here, if it lived."""
        return (self.host, self.namespace) == (socket.gethostname(), namespace_here())


def namespace_here() -> int:
    """Which process ids this process sees; 0 where the system does not tell."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def read_sign(run_dir: Path) -> Sign | None:
    """The newest sign of life; None if there was none.

    Raises:
        UsageError: the file is damaged.
    """
    path = run_dir / ALIVE
    if not os.path.lexists(path):
        return None
    return read_json(path, Sign, most_bytes=_MOST_BYTES)


class Heartbeat:
    """Writes the file every few seconds, whatever training waits for, until the process ends.

    What cannot be written is left out: others then see how old the last sign is.
    """

    def __init__(self, run_dir: Path, every: float = BEATS_EVERY) -> None:
        """Begin, at once."""
        self._path = run_dir / ALIVE
        now = time.time()
        self._sign = Sign(socket.gethostname(), os.getpid(), namespace_here(), now, now)
        self._first: tuple[int, float] | None = None  # the first step, and when it was done
        self._every = every
        self._has_ended = threading.Event()
        self._writing = threading.Lock()
        self._write()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def step(self, step: int) -> None:
        """So many steps are done."""
        now = time.monotonic()
        is_first = self._first is None
        if self._first is None:
            self._first = step, now
        first, began = self._first
        each = (now - began) / (step - first) if step > first else None
        self._sign = replace(self._sign, step=step, seconds_per_step=each)
        if is_first:  # who looks shall see that it does not begin any more
            self._write()

    def go_back(self, step: int) -> None:
        """So many are done again; how long one takes is measured anew."""
        self._first = None
        self.step(step)

    def end(self, state: str, message: str = "") -> None:
        """The last sign."""
        self._has_ended.set()
        self._sign = replace(self._sign, state=state, message=message[:_LONGEST])
        self._write()

    def _beat(self) -> None:
        while not self._has_ended.wait(self._every):
            self._write()

    def _write(self) -> None:
        with self._writing, contextlib.suppress(OSError):
            sign = replace(self._sign, time=time.time())
            replace_text(self._path, json.dumps(asdict(sign)) + "\n")
