"""Terminal output of long runs."""

import os
import re
import textwrap
import time
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from fsdpctl.io.activity import DISPLAY
from fsdpctl.io.files import open_own
from fsdpctl.io.texts import printable

_HEAD = 8  # characters of the subject of a line
# The beginning of a line: its subject or blanks, and the number of an item.
_SUBJECT = re.compile(rf"(?=.{{{_HEAD - 1}}} \S)(?:to fit|\S*) +(?<=^.{{{_HEAD}}})(?:\d\. )?")


class PatientConsole(Console):
    """A console that falls silent if its reader exits or the disk is full; the run continues."""

    @property
    def file(self) -> IO[str]:
        return _Patient(super().file)  # type: ignore[return-value]  # the methods that rich uses

    @file.setter
    def file(self, new: IO[str]) -> None:
        self._file = new


class _Patient:
    """A text stream that ignores failures."""

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream  # None if the descriptor was closed before Python started

    def write(self, text: str) -> int:
        DISPLAY.before_output(text)
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        self._try("flush")

    def _try(self, name: str, *args: str) -> None:
        if self._stream is None:
            return
        try:
            getattr(self._stream, name)(*args)
        except OSError:
            _send_null(self._stream)
        except ValueError:
            pass  # closed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def wrapped(line: str, width: int) -> str:
    """Wrap a line at words, with the continuation below its text; several lines stay as they are.

    Names, paths and settings are not broken.
    """
    if len(line) <= width or "\n" in line:
        return line
    indent = len(line) - len(line.lstrip()) + 2
    if found := _SUBJECT.match(line):
        indent = found.end()
    return "\n".join(
        textwrap.wrap(
            line, max(width, 2 * _HEAD), subsequent_indent=" " * indent, break_long_words=False,
            break_on_hyphens=False, drop_whitespace=True, replace_whitespace=False,
        )
    )  # fmt: skip


def _send_null(stream: IO[str]) -> None:
    """Drop buffered and future output, which would fail again at exit."""
    try:
        descriptor, null = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
    except (OSError, ValueError):
        return
    os.dup2(null, descriptor)
    os.close(null)


def journal(log: Path, text: str) -> None:
    """Append lines with the time to a log. If the disk is full, they are dropped."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    lines = "".join(f"{now} {line}\n" for line in printable(text).splitlines())
    try:
        with open_own(log, "ab", folders=1) as file:
            file.write(lines.encode())
    except OSError:
        pass
