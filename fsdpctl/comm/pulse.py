"""Where a rank is, for who watches it: a few words in memory that its launcher reads.

Written by the thread that trains, at every unit, so that it stands still when that thread does; a
helper thread would live on. Without a system call: a store into a mapped page costs a microsecond.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

PAGE = 256  # bytes of a rank
_HEAD = struct.Struct("<qqqH")  # beats, step, whether it waits, bytes of text
_TEXT = PAGE - _HEAD.size
_NO_STEP = -1
LOADING = "drawing weights"  # a place: takes long where models are large
READING = "reading a checkpoint"  # a place: others may take longer for it
FINISHING = "finishing"  # a place: waits for the user's commands, as long as those may take


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank has last said of itself."""

    count: int  # 0: nothing so far
    step: int | None  # it works on; None until the first one
    waits: bool  # for other ranks
    place: str


class Pulse:
    """This rank's page; without one nothing is written."""

    def __init__(self) -> None:
        self._page: memoryview | None = None
        self._count, self._step, self._waits, self._place = 0, _NO_STEP, False, b""

    def open(self, path: Path, index: int) -> None:
        """Write to page `index` of the file at `path` from now on."""
        with path.open("r+b") as file:
            whole = mmap.mmap(file.fileno(), 0)
        self._page = memoryview(whole)[index * PAGE : (index + 1) * PAGE]

    def at(self, place: str, step: int | None = None) -> None:
        """It has come to `place`, in the step that it said last or in `step`."""
        if self._page is None:
            return
        self._place = place.encode()[:_TEXT]
        if step is not None:
            self._step = step
        self._write(self._page)

    def wait(self, *, begins: bool) -> None:
        """It begins or ends to wait for other ranks."""
        self._waits = begins
        if self._page is not None:
            self._write(self._page)

    def _write(self, page: memoryview) -> None:
        self._count += 1
        head = _HEAD.pack(self._count, self._step, self._waits, len(self._place))
        page[: len(head) + len(self._place)] = head + self._place


PULSE = Pulse()  # of this process


def make_pages(path: Path, count: int) -> None:
    """A file for so many ranks, of which none has said anything."""
    path.write_bytes(bytes(PAGE * count))


def read_beats(pages: BinaryIO) -> list[Beat]:
    """What every rank has last said, or words that it is just writing.

    So that a count is another one says that a rank moves, and nothing else does.
    """
    pages.seek(0)
    content = pages.read()
    found = []
    for start in range(0, len(content), PAGE):
        count, step, waits, length = _HEAD.unpack_from(content, start)
        text = content[start + _HEAD.size :][: min(length, _TEXT)].decode(errors="replace")
        known = step if count and step != _NO_STEP else None
        found.append(Beat(count, known, bool(waits), text))
    return found
