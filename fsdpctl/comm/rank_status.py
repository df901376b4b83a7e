"""The status of each rank of a host, in a file that the launcher and all ranks of the host map.

The training thread writes its status at every unit, so the count of updates stops when that thread
hangs. A helper thread would keep counting, and hide the hang. An update makes no system call: a
store into a mapped page takes a microsecond and needs no disk space.
"""

import ctypes
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fsdpctl.comm.flight_recorder import CollectiveRecord, read_record

_PHASE_BYTES, _ANSWER_BYTES = 224, 16000  # bytes
# Phases that may take long without an update.
DRAWING = "drawing weights"
READING = "reading a checkpoint"
FINISHING = "finishing"  # uploading, or ending a script


class _Page(ctypes.Structure):
    """The status of a rank. Watchdogs and `answer_request` write the fields after `pid`."""

    # `steps` is the step in progress + 1, or 0 before the first step.
    _fields_ = (
        ("count", ctypes.c_int64), ("steps", ctypes.c_int64), ("is_waiting", ctypes.c_int64),
        ("phase", ctypes.c_char * _PHASE_BYTES),
        ("pid", ctypes.c_int64), ("watchdog_polls", ctypes.c_int64),
        ("is_record_requested", ctypes.c_int64), ("is_answered", ctypes.c_int64),
        ("answer", ctypes.c_char * _ANSWER_BYTES),
    )  # fmt: skip


PAGE_BYTES = ctypes.sizeof(_Page)  # bytes per rank


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The last status that a rank wrote."""

    count: int  # number of updates
    step: int | None  # the step in progress; None before the first one
    is_waiting: bool  # for other ranks
    phase: str
    pid: int = 0  # process ID; 0: not started
    watchdog_polls: int = 0  # count of the watchdog in this rank's process, if it has one
    is_record_requested: bool = False  # a watchdog detected a hang and requests the collectives


class RankStatusPage:
    """This rank's page of the file; private memory before `open`."""

    def __init__(self) -> None:
        self._page = _Page()

    def open(self, path: Path, index: int) -> None:
        self._page = _map_pages(path)[index]
        self._page.pid = os.getpid()

    def close(self) -> None:
        """Leave the page as it is: no watchdog sees later updates, such as those of a script."""
        self._page = _Page()

    def at(self, phase: str, step: int | None = None) -> None:
        """Record that the rank has reached `phase`, and `step` if it is a new step."""
        self._page.phase = phase.encode()[:_PHASE_BYTES]
        if step is not None:
            self._page.steps = step + 1
        self._page.count += 1

    def mark_waiting(self, *, begins: bool) -> None:
        self._page.is_waiting = begins
        self._page.count += 1

    def count_watchdog_poll(self) -> None:
        self._page.watchdog_polls += 1

    def answer_request(self) -> bool:
        """Write this rank's collectives if a watchdog has requested them; return whether it has."""
        if self._page.is_record_requested:
            record = read_record()
            text = msgspec.json.encode(record)
            if len(text) > _ANSWER_BYTES:  # too many process groups
                text = msgspec.json.encode(CollectiveRecord(pending=record.pending))
            self._page.answer = text
            self._page.is_answered = True
        return bool(self._page.is_record_requested)


STATUS_PAGE = RankStatusPage()  # the page of this process


class HostPages:
    """The pages of all ranks of this host, for a watchdog. The file may be deleted once mapped."""

    def __init__(self, path: Path) -> None:
        self._pages = _map_pages(path)

    def statuses(self) -> list[RankStatus]:
        """Return the status of every rank. A `phase` may be torn, since ranks write at any time.

        Only a changed `count` shows that a rank makes progress.
        """
        return [
            RankStatus(
                each.count, each.steps - 1 if each.steps else None, bool(each.is_waiting),
                each.phase.decode(errors="replace"), each.pid, each.watchdog_polls,
                bool(each.is_record_requested),
            )
            for each in self._pages
        ]  # fmt: skip

    def request(self, index: int) -> None:
        self._pages[index].is_record_requested = True

    def answer(self, index: int) -> CollectiveRecord | None:
        page = self._pages[index]
        return msgspec.json.decode(page.answer, type=CollectiveRecord) if page.is_answered else None


def make_status_file(count: int, folder: Path | None = None) -> Path:
    """Create a file of empty pages for `count` ranks, in the temporary directory by default."""
    fd, path = tempfile.mkstemp(prefix="fsdpctl-", dir=folder)
    with open(fd, "wb") as file:
        file.write(bytes(PAGE_BYTES * count))
    return Path(path)


def _map_pages(path: Path) -> ctypes.Array[_Page]:
    with path.open("r+b") as file:
        content = mmap.mmap(file.fileno(), 0)
    return (_Page * (len(content) // PAGE_BYTES)).from_buffer(content)
