"""Terminal output of long runs, and its copy in a log file."""

import re
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from rich.console import Console

from fsdpctl.io.files import open_nofollow
from fsdpctl.io.output import LenientStream
from fsdpctl.io.texts import printable

_HEAD = 8  # columns of the subject of a line
# The beginning of a line: a subject ("to fit" or one word) or blanks, padded to _HEAD columns, and
# optionally an item number such as "1. ".
_SUBJECT = re.compile(rf"(?=.{{{_HEAD - 1}}} \S)(?:to fit|\S*) +(?<=^.{{{_HEAD}}})(?:\d\. )?")


class LenientConsole(Console):
    """A console that prints nothing more if its reader exits or the disk is full."""

    @property
    def file(self) -> IO[str]:
        return LenientStream(super().file)  # type: ignore[return-value]  # has the methods that rich calls

    @file.setter
    def file(self, new: IO[str]) -> None:
        self._file = new


def wrapped(line: str, width: int) -> str:
    """Wrap a line at words, and indent the following lines. Multi-line texts stay unchanged.

    Names, paths and settings are not broken.
    """
    if len(line) <= width or "\n" in line:
        return line
    indent = len(line) - len(line.lstrip()) + 2
    if subject := _SUBJECT.match(line):
        indent = subject.end()
    return "\n".join(
        textwrap.wrap(
            line, max(width, 2 * _HEAD), subsequent_indent=" " * indent, break_long_words=False,
            break_on_hyphens=False, drop_whitespace=True, replace_whitespace=False,
        )
    )  # fmt: skip


def append_to_log(log: Path, text: str) -> None:
    """Append lines with the time to a log. If the disk is full, the lines are dropped."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    lines = "".join(f"{now} {line}\n" for line in printable(text).splitlines())
    with suppress(OSError), open_nofollow(log, "ab", num_folders=1) as file:
        file.write(lines.encode())
