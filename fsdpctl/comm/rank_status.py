"""The status of each rank of a host, in a file that its launcher and the other ranks map and read.

The training thread writes it at every unit, so the count stops when that thread hangs; a helper
thread would keep running. There is no system call: a store into a mapped page takes a microsecond,
and it needs no room on a disk.
"""

import ctypes
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fsdpctl.comm.flight_recorder import CollectiveRecord, read_record

_TEXT, _ANSWER = 224, 16000  # bytes
LOADING = "drawing weights"  # a place: takes long for large models
READING = "reading a checkpoint"  # a place: may take other ranks longer
FINISHING = "finishing"  # a place: waits for uploads, or for a script, as long as they take


class _Page(ctypes.Structure):
    """The status of a rank; below, what other threads than the training thread write."""

    _fields_ = (
        ("count", ctypes.c_int64), ("steps", ctypes.c_int64), ("waits", ctypes.c_int64),
        ("place", ctypes.c_char * _TEXT),
        ("pid", ctypes.c_int64), ("looks", ctypes.c_int64),
        ("is_asked", ctypes.c_int64), ("has_answered", ctypes.c_int64),
        ("answer", ctypes.c_char * _ANSWER),
    )  # fmt: skip


PAGE_BYTES = ctypes.sizeof(_Page)  # bytes per rank


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The last status that a rank wrote."""

    count: int  # updates; 0: none so far
    step: int | None  # the step in progress; None before the first one
    is_waiting: bool  # for other ranks
    phase: str
    pid: int = 0  # of its process; 0: not started
    heartbeats: int = 0  # of its own watchdog, if it has one
    is_requested: bool = False  # because of a hang


class RankStatusPage:
    """This rank's page of the file; before the file is open, its own memory."""

    def __init__(self) -> None:
        self._page = _Page()

    def open(self, path: Path, index: int) -> None:
        self._page = _mapped(path)[index]
        self._page.pid = os.getpid()

    def at(self, place: str, step: int | None = None) -> None:
        """Record that the rank has reached `place`, in the previous step or in `step`."""
        self._page.place = place.encode()[:_TEXT]
        if step is not None:
            self._page.steps = step + 1
        self._page.count += 1

    def wait(self, *, begins: bool) -> None:
        self._page.waits = begins
        self._page.count += 1

    def heartbeat(self) -> None:
        self._page.looks += 1

    def answer(self) -> bool:
        """Write the collectives that this rank has started, if a watchdog has asked for them."""
        if self._page.is_asked:
            found = read_record()
            text = msgspec.json.encode(found)
            if len(text) > _ANSWER:  # of very many process groups
                text = msgspec.json.encode(CollectiveRecord(pending=found.pending))
            self._page.answer = text
            self._page.has_answered = True
        return bool(self._page.is_asked)


RANK_STATUS = RankStatusPage()  # of this process


class HostPages:
    """The pages of all ranks of this host, for a watchdog. The file itself may be removed."""

    def __init__(self, path: Path) -> None:
        self._pages = _mapped(path)

    def statuses(self) -> list[RankStatus]:
        """Return the status of every rank; the text may be half written.

        Only a changed `count` shows that a rank makes progress.
        """
        return [
            RankStatus(
                each.count, each.steps - 1 if each.steps else None, bool(each.waits),
                each.place.decode(errors="replace"), each.pid, each.looks, bool(each.is_asked),
            )
            for each in self._pages
        ]  # fmt: skip

    def ask(self, index: int) -> None:
        self._pages[index].is_asked = True

    def answer(self, index: int) -> CollectiveRecord | None:
        page = self._pages[index]
        return (
            msgspec.json.decode(page.answer, type=CollectiveRecord) if page.has_answered else None
        )


def make_status_file(count: int, folder: Path | None = None) -> Path:
    """Create a file of empty pages for `count` ranks, among the temporary files by default."""
    number, path = tempfile.mkstemp(prefix="fsdpctl-", dir=folder)
    with open(number, "wb") as file:
        file.write(bytes(PAGE_BYTES * count))
    return Path(path)


def _mapped(path: Path) -> ctypes.Array[_Page]:
    with path.open("r+b") as file:
        content = mmap.mmap(file.fileno(), 0)
    return (_Page * (len(content) // PAGE_BYTES)).from_buffer(content)
