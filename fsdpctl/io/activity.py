"""The activities of this process, shown while the user waits for them.

The innermost activity is shown once nothing was printed for some time: on a terminal as a line
that the next output replaces, elsewhere as lines whose distance doubles. Imports little: the
command line shows its own start.
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

QUIET = "FSDPCTL_QUIET"  # set if no progress is shown, here and in the workers
BYTES, CONVERSATIONS = "bytes", "conversations"
_PATIENCE, _AT_ONCE = 1.5, 1.0  # seconds without output: in a log, and on a terminal
_LONGEST = 30.0  # seconds between two lines
_REDRAWN = 0.125  # seconds between two looks
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_ERASE = "\r\x1b[2K"
# Variables with the number of a process among those that a launcher has started.
_NUMBERS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")

Advance = Callable[[int], None]


class Reporter(NamedTuple):
    """Functions that print for a command."""

    result: Callable[[str], None]  # a line of its result
    note: Callable[[str], None]  # a line about its progress; `-q` hides it, and the next
    info: Callable[[str], None]  # a line about what follows


@dataclass
class _Activity:
    what: str
    unit: str
    total: int | None
    done: int = 0
    began: float = field(default_factory=time.monotonic)

    def advance(self, count: int = 1) -> None:
        self.done += count

    def text(self) -> str:
        """Return such as `validating: 12 of 40 batches, 0:07`."""
        seconds = int(time.monotonic() - self.began)
        how_far = left = ""
        if self.unit == BYTES and self.total:
            how_far = f": {format_bytes(self.done)} of {format_bytes(self.total)}"
            if 0 < self.done < self.total and seconds:
                more = int(seconds * (self.total - self.done) / self.done)
                left = f", {more // 60}:{more % 60:02d} left"
        elif self.done or self.total:
            of = f" of {self.total:,}" if self.total else ""
            how_far = f": {self.done:,}{of} {self.unit}"
        return f"{one_line(self.what)}{how_far}, {seconds // 60}:{seconds % 60:02d}{left}"


def is_first_process() -> bool:
    """Return whether this process is the only one, or the first of those of a launcher."""
    return all(os.environ.get(name, "0") == "0" for name in _NUMBERS)


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
        self._forget()
        self._bar: Callable[[str], None] | None = None
        self._is_drawn = self._is_midline = False
        self._spoke, self._waits = time.monotonic(), _PATIENCE
        os.register_at_fork(after_in_child=self._forget)  # a child has no thread for it

    def _forget(self) -> None:
        self._lock = threading.RLock()
        self._beginning: _Activity | None = None
        self._stream: IO[str] | None = None  # None: nothing is shown

    def start(self, stream: IO[str] | None, what: str) -> None:
        """Show activities on `stream` unless quiet; `what`, if there is none, until `started`."""
        if stream is None or os.environ.get(QUIET):
            return
        with self._lock:
            self._beginning = _Activity(what, "", None)
            self._stream = stream
        threading.Thread(target=self._show, args=(stream,), name="activity", daemon=True).start()

    def end_startup(self) -> None:
        """Show nothing while nothing else is done."""
        with self._lock:
            self._erase()
            self._beginning = None

    def stop(self) -> None:
        """Show no more: others print to the terminal."""
        with self._lock:
            self._erase()
            self._stream = self._beginning = None

    def attach_bar(self, bar: Callable[[str], None] | None) -> None:
        """Let `bar`, a live line of this terminal, show activities instead; None: no longer."""
        with self._lock:
            self._erase()
            self._bar = bar

    @contextmanager
    def doing(self, what: str, unit: str = "", total: int | None = None) -> Iterator[Advance]:
        """Show `what` while the block runs; yield a function to add to the units done."""
        activity = _Activity(what, unit, total)
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
        """Show a line that stays, unless quiet."""
        with self._lock:
            self._erase()
            self._write(f"{one_line(text)}\n")
            self._spoke = time.monotonic()

    def before_output(self, text: str) -> None:
        """Make room for output that follows, and count the seconds of silence from now."""
        if not text or self._bar is not None:  # a bar writes on its own
            return
        with self._lock:
            self._erase()
            self._is_midline = not text.endswith("\n")
            self._spoke, self._waits = time.monotonic(), _PATIENCE

    def _erase(self) -> None:
        if self._is_drawn and self._bar is None:
            self._write(_ERASE)
        self._is_drawn = False

    def _show(self, stream: IO[str]) -> None:
        redraws = stream.isatty() and os.environ.get("TERM") != "dumb"
        frames = itertools.cycle(_frames(stream) if redraws else [""])
        while self._stream is stream:
            time.sleep(_REDRAWN)
            with self._lock:
                shown = self._activities[-1] if self._activities else self._beginning
                if self._stream is not stream or shown is None:
                    continue
                text, bar = shown.text(), self._bar
                if bar is None and not self._is_midline:
                    self._show_line(text, next(frames))
            if bar is not None:  # which has a lock of its own
                bar(text)

    def _show_line(self, text: str, frame: str) -> None:
        silent = time.monotonic() - self._spoke
        if frame and silent >= _AT_ONCE:
            width = shutil.get_terminal_size().columns - 1
            self._is_drawn = True
            self._write(f"{_ERASE}{f'{frame} {text}'[:width]}")
        elif not frame and silent >= self._waits:
            self._write(f"{text}\n")
            self._spoke = time.monotonic()
            self._waits = min(2 * self._waits, _LONGEST)

    def _write(self, text: str) -> None:
        stream = self._stream
        with suppress(OSError, ValueError, UnicodeError):  # its reader may have exited
            if stream is not None:
                stream.write(text)
                stream.flush()


DISPLAY = Display()  # of this process
doing = DISPLAY.doing
