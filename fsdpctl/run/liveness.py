"""Whether somebody works on a run: seen among this machine's processes, or by its sign of life.

Note: the run's lock is not tried for. Who takes it, however shortly, may keep a launcher from
starting; and between machines not every file system has it. A launcher and its ranks have the lock
file open as long as they live, which the kernel says of processes of the same user.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from fsdpctl.errors import UsageError
from fsdpctl.io.files import read_regular
from fsdpctl.run.files import LOCK
from fsdpctl.run.heartbeat import BEATS_EVERY, RUNNING, Sign

_QUIET_SECONDS = 18 * BEATS_EVERY  # a network file system may show a file as it was a minute ago
_CLOCKS_DIFFER = 2.0  # seconds between when a process began, and what it says of that

Seen = Literal["process", "sign of life", "nothing"]


@dataclass(frozen=True, slots=True)
class Liveness:
    """Whether it lives, and where that is known from."""

    is_alive: bool
    seen: Seen
    pid: int | None = None  # of the process that was seen, or that the sign names
    heard_seconds_ago: float | None = None  # of the last sign of life


def liveness(run_dir: Path, sign: Sign | None, now: float | None = None) -> Liveness:
    """Whether the run in `run_dir` lives, whose last sign of life is `sign`; writes nothing."""
    heard = None if sign is None else max(0.0, (now or time.time()) - sign.time)
    for pid in _named(run_dir, sign):
        if _has_open(pid, run_dir / LOCK):
            return Liveness(True, "process", pid, heard)
    if sign is None or heard is None or sign.state != RUNNING:
        return Liveness(False, "nothing", None, heard)
    if sign.is_of_this_host:
        lives = _is_that_process(sign)
        return Liveness(lives, "process" if lives else "nothing", sign.pid, heard)
    lives = heard < _QUIET_SECONDS
    return Liveness(lives, "sign of life" if lives else "nothing", sign.pid, heard)


def _named(run_dir: Path, sign: Sign | None) -> list[int]:
    """The processes to look at: the launcher that the lock names, and rank 0."""
    found = [] if sign is None or not sign.is_of_this_host else [sign.pid]
    try:
        text = read_regular(run_dir / LOCK, 32).decode("ascii", "replace").strip()
    except UsageError:
        return found
    return [int(text), *found] if text.isdigit() else found


def _has_open(pid: int, path: Path) -> bool:
    """Whether a process has a file open; False too where that is not to be seen."""
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


def _is_that_process(sign: Sign) -> bool:
    """Whether rank 0 still lives: its process id may by now be another's, which began later."""
    try:
        process = psutil.Process(sign.pid)
        is_it = process.create_time() <= sign.began + _CLOCKS_DIFFER
        return is_it and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
