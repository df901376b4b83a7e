"""What is asked of a living run: by signals, by files in its directory, by the clock.

Note: a rank hears for itself, and does nothing about it: what it heard goes with the record of a
step, or with what the ranks say to each other between the batches of a validation and the tokens of
a sample, so that all of them heed it at the same place. Files and the clock are rank 0's.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from fsdpctl.config.model_path import RUN_CONFIG
from fsdpctl.train.kept import KeptFiles

STOP, SAVE, PROFILE = "STOP", "SAVE", "PROFILE"
REQUESTS = (STOP, SAVE, PROFILE)  # files in the run directory
_LOOKS_EVERY = 1.0  # seconds: a file system of a cluster is asked for it


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for; the fields are in the order of `flags`."""

    by_signal: bool = False  # to end
    by_file: bool = False
    by_clock: bool = False
    is_lost: bool = False  # the run directory: to end, once it is written again
    save: bool = False
    profile: bool = False

    @property
    def ends(self) -> bool:
        """Whether the run is to end, for whatever reason."""
        return self.by_signal or self.by_file or self.by_clock or self.is_lost

    @property
    def flags(self) -> tuple[bool, ...]:
        """How ranks say it to each other."""
        return astuple(self)

    def __or__(self, other: "Asked") -> "Asked":
        return Asked(*(a or b for a, b in zip(self.flags, other.flags, strict=True)))


class TimeLimit:
    """When a run must ask itself to stop, so that all is saved within its time.

    That is when less is left than twice the longest step and three times the longest save. Between
    two looks lies a step, on CUDA one more is under way; a save that was due may have begun, then
    comes the last one: a third of what saves need is spare.
    The first step of a start, which compiles and allocates, does not count; the one that is under
    way counts as far as it has come.
    """

    def __init__(self, seconds: float | None, started: float, longest_save: float) -> None:
        """`seconds` since `started`, in seconds since the epoch; None: for ever.

        `longest_save` is what is known of earlier starts; saves of this one may be longer.
        """
        self._ends = None if seconds is None else started + seconds
        self._longest_step = 0.0
        self._longest_save = longest_save
        self._num_steps = 0

    def step_took(self, seconds: float) -> None:
        """A step is over."""
        self._num_steps += 1
        if self._num_steps > 1:
            self._longest_step = max(self._longest_step, seconds)

    def save_took(self, seconds: float) -> None:
        """A checkpoint is complete, so long after it was begun."""
        self._longest_save = max(self._longest_save, seconds)

    def is_near(self, seconds: float = 0.0) -> bool:
        """Whether it is time to stop, in a step that has taken so many seconds so far."""
        if self._ends is None:
            return False
        step = max(self._longest_step, seconds)
        return time.time() + 2 * step + 3 * self._longest_save >= self._ends


class Requests:
    """This rank's ears."""

    def __init__(self, run_dir: Path, files: KeptFiles, limit: TimeLimit | None) -> None:
        """Of a run that has begun; `limit` is rank 0's, which alone looks for files."""
        self._run_dir = run_dir
        self._files = files
        self.limit = limit
        self._heard: set[str] = set()  # files that all ranks have been told of, and are still there
        self._looked = time.monotonic()

    def look(self, *, by_signal: bool, seconds: float = 0.0) -> Asked:
        """What is asked for now; what a file asks for is said once.

        `seconds`: what the step has taken so far, where this is in one.
        """
        if self.limit is None:
            return Asked(by_signal=by_signal, is_lost=self._files.look())
        new = self._new_files()
        return Asked(
            by_signal=by_signal,
            by_file=STOP in new,
            by_clock=self.limit.is_near(seconds),
            is_lost=self._files.look(),
            save=SAVE in new,
            profile=PROFILE in new,
        )

    def _new_files(self) -> Sequence[str]:
        if time.monotonic() - self._looked < _LOOKS_EVERY:
            return ()
        self._looked = time.monotonic()
        there = [name for name in REQUESTS if (self._run_dir / name).exists()]
        new = [name for name in there if name not in self._heard]
        self._heard |= set(new)
        return new

    def is_heard(self, name: str) -> bool:
        """Whether rank 0 has passed on what the file `name` asks for, and has not done with it."""
        return name in self._heard

    def done(self, name: str) -> None:
        """What the file asked for is done: it goes."""
        if name in self._heard and _remove(self._run_dir / name):
            self._heard.discard(name)

    def remove_left_over(self) -> list[str]:
        """Remove what was asked of an earlier start; returns a line of each."""
        if self.limit is None:
            return []
        found = [name for name in REQUESTS if _is_left_over(self._run_dir, name)]
        for name in found:
            _remove(self._run_dir / name)
        return [f"{name} was left from before this start; removed" for name in found]

    def end(self) -> list[str]:
        """The run is over: remove what came too late; returns a line of each."""
        if self.limit is None:
            return []
        found = [name for name in REQUESTS if (self._run_dir / name).exists()]
        for name in found:
            _remove(self._run_dir / name)
        return [f"{name} came when there was nothing left to do; removed" for name in found]


def take_stop(run_dir: Path) -> bool:
    """Whether a STOP asks this start for an end; it is removed."""
    if not (run_dir / STOP).exists() or _is_left_over(run_dir, STOP):
        return False
    _remove(run_dir / STOP)
    return True


def early_request(run_dir: Path, seconds: float | None, started: float) -> str | None:
    """Why a start that has nothing to save yet is to end at once; None: it is not.

    A STOP that is there is removed, unless it was left over.
    """
    if seconds is not None and time.time() >= started + seconds:
        return f"launch.time_limit={seconds:g} is over"
    return f"{run_dir / STOP} was there" if take_stop(run_dir) else None


def _is_left_over(run_dir: Path, name: str) -> bool:
    """Whether the file is older than this start, which wrote the configuration anew.

    Both times are of the file system that has both.
    """
    with contextlib.suppress(OSError):
        return (run_dir / name).stat().st_mtime_ns < (run_dir / RUN_CONFIG).stat().st_mtime_ns
    return False


def _remove(path: Path) -> bool:
    """Whether it is gone; what cannot be removed must not ask for ever."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        return True
    return False
