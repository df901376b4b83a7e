"""Stop, save and profile requests: by signals, by files in the run directory, by the time limit.

Note: a rank only collects requests. Ranks exchange them with the record of a step, between the
batches of a validation, and between the tokens of a sample, so that all ranks act on a request at
the same point. Only rank 0 polls files and the clock.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from fsdpctl.comm.collectives import AsyncHostCopy, Collectives, count_flags
from fsdpctl.io.run_files import PROFILE, RUN_CONFIG, SAVE, STOP

REQUESTS = (STOP, SAVE, PROFILE)  # files in the run directory
_POLL_SECONDS = 1.0  # each poll of files accesses a shared file system


@dataclass(frozen=True, slots=True)
class RequestFlags:
    """The requests of one rank or of all ranks; the fields are in the order of `flags`."""

    stop_by_signal: bool = False
    stop_by_file: bool = False
    stop_by_clock: bool = False
    save: bool = False
    profile: bool = False

    @property
    def stops(self) -> bool:
        return self.stop_by_signal or self.stop_by_file or self.stop_by_clock

    @property
    def flags(self) -> tuple[bool, ...]:
        """The fields as booleans, which ranks exchange."""
        return astuple(self)

    def __or__(self, other: "RequestFlags") -> "RequestFlags":
        return RequestFlags(*(a or b for a, b in zip(self.flags, other.flags, strict=True)))


class TimeLimit:
    """The time at which a run must stop so that everything is saved within its limit.

    A run stops when less time is left than twice the longest step plus three times the longest
    save. Two steps: one runs between two polls, and on CUDA a second one is in flight. Three saves:
    one that was due may have begun, the last one follows, and a third one is a margin.
    The first step of a start, which compiles and allocates, does not count. The step in progress
    counts with its time so far.
    """

    def __init__(self, seconds: float | None, started: float, longest_save_seconds: float) -> None:
        """Set a limit of `seconds` after `started` (seconds since the epoch); None: no limit."""
        self._ends = None if seconds is None else started + seconds
        self._longest_step = 0.0
        self._longest_save_seconds = longest_save_seconds
        self._num_steps = 0

    def add_step(self, seconds: float) -> None:
        self._num_steps += 1
        if self._num_steps > 1:
            self._longest_step = max(self._longest_step, seconds)

    def add_save(self, seconds: float) -> None:
        self._longest_save_seconds = max(self._longest_save_seconds, seconds)

    def is_near(self, seconds: float = 0.0) -> bool:
        """Return whether it is time to stop, `seconds` into the current step."""
        if self._ends is None:
            return False
        step = max(self._longest_step, seconds)
        return time.time() + 2 * step + 3 * self._longest_save_seconds >= self._ends


class RequestCollector:
    """The requests that this rank has received."""

    def __init__(
        self, run_dir: Path, limit: TimeLimit, *, is_rank_0: bool,
        stop_requested: Callable[[], bool], before_poll: Callable[[], None],
    ) -> None:  # fmt: skip
        """Collect the requests of a run; ranks other than rank 0 poll signals only."""
        self._run_dir = run_dir
        self.limit, self._is_rank_0 = limit, is_rank_0
        self._stop_requested, self._before_poll = stop_requested, before_poll
        self._reported: set[str] = set()  # files that `poll` has returned and that still exist
        self._polled_at = time.monotonic()

    def poll(self, seconds: float = 0.0) -> RequestFlags:
        """Return the current requests, `seconds` into the current step; return each file once."""
        by_signal = self._stop_requested()
        if not self._is_rank_0:
            return RequestFlags(stop_by_signal=by_signal)
        new = self._new_files()
        by_clock = self.limit.is_near(seconds)
        return RequestFlags(by_signal, STOP in new, by_clock, SAVE in new, PROFILE in new)

    def _new_files(self) -> Sequence[str]:
        if time.monotonic() - self._polled_at < _POLL_SECONDS:
            return ()
        self._polled_at = time.monotonic()
        self._before_poll()
        existing = [name for name in REQUESTS if (self._run_dir / name).exists()]
        new = [name for name in existing if name not in self._reported]
        self._reported |= set(new)
        return new

    def clear(self, name: str) -> None:
        if name in self._reported and _remove(self._run_dir / name):
            self._reported.discard(name)

    def remove_stale(self, *, at_end: bool) -> list[str]:
        """Remove requests to an earlier start, or all `at_end`; return a message for each."""
        if not self._is_rank_0:
            return []
        existing = [name for name in REQUESTS if (self._run_dir / name).exists()]
        names = [name for name in existing if at_end or _is_older_than_start(self._run_dir, name)]
        for name in names:
            _remove(self._run_dir / name)
        reason = "came after the last step" if at_end else "from before this start"
        return [f"{name}: request removed ({reason})" for name in names]


class RequestSync:
    """An exchange of requests between the ranks during validation and sampling.

    `lag` exchanges stay in flight, so that CUDA is not synchronized. All ranks must call
    `should_continue` equally often.
    """

    def __init__(
        self, poll: Callable[[], RequestFlags], collectives: Collectives, device: torch.device,
        lag: int = 0,
    ) -> None:  # fmt: skip
        """Exchange the results of `poll()`."""
        self.received = RequestFlags()
        self._poll, self._collectives, self._device, self._lag = poll, collectives, device, lag
        self._pending: deque[AsyncHostCopy] = deque()

    def should_continue(self) -> bool:
        """Exchange requests; return False if a rank has received a stop request. Collective."""
        self._pending.append(count_flags(self._collectives, self._poll().flags, self._device))
        return not self._receive(self._lag).stops

    def complete(self) -> RequestFlags:
        return self._receive(lag=0)

    def _receive(self, lag: int) -> RequestFlags:
        while len(self._pending) > lag:
            counts = self._pending.popleft().tolist()
            self.received |= RequestFlags(*(count > 0 for count in counts))
        return self.received


def take_stop_request(run_dir: Path) -> bool:
    """Remove the file STOP; return whether it exists and is not older than this start."""
    if not (run_dir / STOP).exists() or _is_older_than_start(run_dir, STOP):
        return False
    _remove(run_dir / STOP)
    return True


def take_stop_reason(run_dir: Path, seconds: float | None, started: float) -> str | None:
    """Return why a start without a completed step must stop, or None; removes the file STOP."""
    if seconds is not None and time.time() >= started + seconds:
        return f"launch.time_limit={seconds:g} exceeded"
    return f"requested by {run_dir / STOP}" if take_stop_request(run_dir) else None


def _is_older_than_start(run_dir: Path, name: str) -> bool:
    """Return whether a file is older than this start, which has written RUN_CONFIG."""
    with contextlib.suppress(OSError):
        return (run_dir / name).stat().st_mtime_ns < (run_dir / RUN_CONFIG).stat().st_mtime_ns
    return False


def _remove(path: Path) -> bool:
    """Remove a file; return whether it is gone. A request in a remaining file is not repeated."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        return True
    return False
