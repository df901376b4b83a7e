"""The status of each rank in a file that its launcher maps and reads.

The training thread writes it at every unit, so the count stops when that thread hangs; a helper
thread would keep running. There is no system call: a store into a mapped page takes a microsecond.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

PAGE = 256  # bytes per rank
_HEAD = struct.Struct("<qqqH")  # number of updates, step, whether it waits, bytes of text
_TEXT = PAGE - _HEAD.size
_NO_STEP = -1
LOADING = "drawing weights"  # a place: takes long for large models
READING = "reading a checkpoint"  # a place: may take other ranks longer
FINISHING = "finishing"  # a place: waits for the user's commands as long as they take


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The last status that a rank wrote."""

    count: int  # updates; 0: none so far
    step: int | None  # the step in progress; None before the first one
    waits: bool  # for other ranks
    place: str


class RankStatusPage:
    """This rank's page of the file; without an open file, updates do nothing."""

    def __init__(self) -> None:
        self._page: memoryview | None = None
        self._count, self._step, self._waits, self._place = 0, _NO_STEP, False, b""

    def open(self, path: Path, index: int) -> None:
        """Write to page `index` of the file at `path` from now on."""
        with path.open("r+b") as file:
            whole = mmap.mmap(file.fileno(), 0)
        self._page = memoryview(whole)[index * PAGE : (index + 1) * PAGE]

    def at(self, place: str, step: int | None = None) -> None:
        """Record that the rank has reached `place`, in the previous step or in `step`."""
        if self._page is None:
            return
        self._place = place.encode()[:_TEXT]
        if step is not None:
            self._step = step
        self._write(self._page)

    def wait(self, *, begins: bool) -> None:
        """Record that the rank begins or ends to wait for other ranks."""
        self._waits = begins
        if self._page is not None:
            self._write(self._page)

    def _write(self, page: memoryview) -> None:
        self._count += 1
        head = _HEAD.pack(self._count, self._step, self._waits, len(self._place))
        page[: len(head) + len(self._place)] = head + self._place


RANK_STATUS = RankStatusPage()  # of this process


def make_status_file(path: Path, count: int) -> None:
    """Create a file of empty pages for `count` ranks."""
    path.write_bytes(bytes(PAGE * count))


def read_rank_statuses(pages: BinaryIO) -> list[RankStatus]:
    """Return the status of every rank; the text may be half written.

    Only a changed `count` shows that a rank makes progress.
    """
    pages.seek(0)
    content = pages.read()
    found = []
    for start in range(0, len(content), PAGE):
        count, step, waits, length = _HEAD.unpack_from(content, start)
        text = content[start + _HEAD.size :][: min(length, _TEXT)].decode(errors="replace")
        known = step if count and step != _NO_STEP else None
        found.append(RankStatus(count, known, bool(waits), text))
    return found
