"""Shows the current activity of this process while the user waits for it.

The innermost activity is shown if nothing was printed for some time: on a terminal as a line that
the next output replaces, in a log as lines at intervals that double. This module imports little,
because it also shows the start of the command line.
"""

import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, NamedTuple

from fsdpctl.io.texts import format_bytes, one_line

QUIET = "FSDPCTL_QUIET"  # set if this process and its workers show no progress
BYTES, CONVERSATIONS = "bytes", "conversations"  # units
# Seconds without output before an activity is shown: in a log, and on a terminal.
_LOG_DELAY, _TERMINAL_DELAY = 1.5, 1.0
_MAX_LOG_INTERVAL = 30.0  # seconds between two lines of a log
_REDRAW_INTERVAL = 0.125  # seconds
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_ERASE = "\r\x1b[2K"
# Environment variables with the rank of this process.
_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")

Advance = Callable[[int], None]


class Reporter(NamedTuple):
    """Functions that print a line for a command. `-q` hides notes and infos."""

    result: Callable[[str], None]
    note: Callable[[str], None]  # to standard error
    info: Callable[[str], None]  # to standard output, as results


@dataclass
class _Activity:
    label: str
    unit: str
    total: int | None
    done: int = 0
    began: float = field(default_factory=time.monotonic)

    def advance(self, count: int = 1) -> None:
        self.done += count

    def text(self) -> str:
        """Return a line such as `validating: 12 of 40 batches, 0:07`."""
        seconds = int(time.monotonic() - self.began)
        progress = left = ""
        if self.unit == BYTES and self.total:
            progress = f": {format_bytes(self.done)} of {format_bytes(self.total)}"
            if 0 < self.done < self.total and seconds:
                seconds_left = int(seconds * (self.total - self.done) / self.done)
                left = f", {seconds_left // 60}:{seconds_left % 60:02d} left"
        elif self.done or self.total:
            of_total = f" of {self.total:,}" if self.total else ""
            progress = f": {self.done:,}{of_total} {self.unit}"
        return f"{one_line(self.label)}{progress}, {seconds // 60}:{seconds % 60:02d}{left}"


def is_first_process() -> bool:
    """Return whether no launcher started this process, or started it as rank 0."""
    return all(os.environ.get(name, "0") == "0" for name in _RANK_VARIABLES)


def _frames(stream: IO[str]) -> str:
    try:
        _FRAMES.encode(getattr(stream, "encoding", None) or "ascii")
    except UnicodeError:
        return "|/-\\"
    return _FRAMES


class Display:
    """The activities of this process, innermost last, and the thread that shows them."""

    def __init__(self) -> None:
        self._activities: list[_Activity] = []
        self._reset()
        self._bar: Callable[[str], None] | None = None
        self._is_drawn = self._is_midline = False
        self._last_output, self._delay = time.monotonic(), _LOG_DELAY
        # A forked child has no display thread, and must not inherit a lock that this one holds.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._startup: _Activity | None = None
        self._stream: IO[str] | None = None  # None: nothing is shown

    def start(self, stream: IO[str] | None, label: str) -> None:
        """Show activities on `stream` unless quiet; until `end_startup`, `label` between them."""
        if stream is None or os.environ.get(QUIET):
            return
        with self._lock:
            self._startup = _Activity(label, "", None)
            self._stream = stream
        threading.Thread(target=self._show, args=(stream,), name="activity", daemon=True).start()

    def end_startup(self) -> None:
        """From now on, show nothing between activities."""
        with self._lock:
            self._erase()
            self._startup = None

    def stop(self) -> None:
        """Stop showing activities, because other processes print to the terminal."""
        with self._lock:
            self._erase()
            self._stream = self._startup = None

    def attach_bar(self, bar: Callable[[str], None] | None) -> None:
        """Let `bar`, which draws a progress bar on this terminal, show activities; None: stop."""
        with self._lock:
            self._erase()
            self._bar = bar

    @contextmanager
    def doing(self, label: str, unit: str = "", total: int | None = None) -> Iterator[Advance]:
        """Show `label` while the block runs; yield a function that adds to the completed units."""
        activity = _Activity(label, unit, total)
        with self._lock:
            self._activities.append(activity)
        try:
            yield activity.advance
        finally:
            with self._lock:
                self._activities.remove(activity)
                bar = None if self._activities else self._bar
            if bar is not None:
                bar("")

    def print_line(self, text: str) -> None:
        """Print a permanent line, unless quiet."""
        with self._lock:
            self._erase()
            self._write(f"{one_line(text)}\n")
            self._last_output = time.monotonic()

    def before_output(self, text: str) -> None:
        """Erase the activity before `text` is printed, and restart the delay of the next one."""
        if not text or self._bar is not None:  # the bar writes its own lines
            return
        with self._lock:
            self._erase()
            self._is_midline = not text.endswith("\n")
            self._last_output, self._delay = time.monotonic(), _LOG_DELAY

    def _erase(self) -> None:
        if self._is_drawn and self._bar is None:
            self._write(_ERASE)
        self._is_drawn = False

    def _show(self, stream: IO[str]) -> None:
        redraws = stream.isatty() and os.environ.get("TERM") != "dumb"
        frames = itertools.cycle(_frames(stream) if redraws else [""])
        while self._stream is stream:
            time.sleep(_REDRAW_INTERVAL)
            with self._lock:
                shown = self._activities[-1] if self._activities else self._startup
                if self._stream is not stream or shown is None:
                    continue
                text, bar = shown.text(), self._bar
                if bar is None and not self._is_midline:
                    self._show_line(text, next(frames))
            # Without our lock: the bar takes its own, so both together could deadlock.
            if bar is not None:
                bar(text)

    def _show_line(self, text: str, frame: str) -> None:
        silence = time.monotonic() - self._last_output
        if frame and silence >= _TERMINAL_DELAY:
            width = shutil.get_terminal_size().columns - 1
            self._is_drawn = True
            self._write(f"{_ERASE}{f'{frame} {text}'[:width]}")
        elif not frame and silence >= self._delay:
            self._write(f"{text}\n")
            self._last_output = time.monotonic()
            self._delay = min(2 * self._delay, _MAX_LOG_INTERVAL)

    def _write(self, text: str) -> None:
        if self._stream is not None:
            with suppress(OSError, ValueError):  # the reader may have exited
                print(text, end="", file=self._stream, flush=True)


DISPLAY = Display()  # the only instance in a process
doing = DISPLAY.doing
