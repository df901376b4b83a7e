"""The processes that run templates, and the rows that are sent through them, in order."""

import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

import fsdpctl
from fsdpctl.data.chats.child import LENGTH_BYTES, Answer, Setup, seconds_for, send
from fsdpctl.data.chats.rows import Chat
from fsdpctl.data.chats.samples import Made
from fsdpctl.errors import UsageError

MOST_SECONDS, MOST_BYTES = 10.0, 2 << 30  # for a chat, of which few take a hundredth
_PATIENCE = 20  # times as long by the clock, on a busy machine, before a process is given up
_AT_ONCE = 32  # chats
_WORTH_ONE = 1 << 19  # bytes, that take about as long as a process takes to begin


@dataclass(frozen=True, slots=True)
class _Parcel:
    """What a process is busy with."""

    process: subprocess.Popen[bytes]
    places: list[str]  # where each of the chats is from
    seconds: float  # that they may compute

    @property
    def where(self) -> str:
        """All of them, for what cannot be said of one."""
        first, last = self.places[0], self.places[-1]
        return first if first == last else f"{first} (to {last})"


class Workers:
    """Some processes with the same template."""

    def __init__(self, setup: Setup, where: str, count: int) -> None:
        """Start `count` of them; `where` names the template.

        Raises:
            UsageError: it is no template.
        """
        self._setup = setup
        self._processes = [_start() for _ in range(count)]
        try:
            for process in self._processes:
                _send(process, setup, where)
            for process in self._processes:
                self._answers(_Parcel(process, [where], setup.most_seconds))
        except BaseException:
            self.close()
            raise

    def results(self, chats: Iterable[tuple[Chat, str]]) -> Iterator[Made]:
        """What each of the chats becomes, in their order; the text is where one is from.

        Raises:
            UsageError: the template refuses one, or its turns are not found; begins with where.
        """
        # A process has one parcel at a time: while it writes an answer, nobody writes to it.
        waiting: deque[_Parcel] = deque()
        for number, some in enumerate(_some_at_a_time(chats)):
            if len(waiting) == len(self._processes):
                yield from self._made(waiting.popleft())
            process = self._processes[number % len(self._processes)]
            seconds = sum(seconds_for(self._setup, chat) for chat, _ in some)
            parcel = _Parcel(process, [where for _, where in some], seconds)
            _send(process, [chat for chat, _ in some], parcel.where)
            waiting.append(parcel)
        while waiting:
            yield from self._made(waiting.popleft())

    def _made(self, parcel: "_Parcel") -> Iterator[Made]:
        return (each.made for each in self._answers(parcel) if each.made is not None)

    def _answers(self, parcel: "_Parcel") -> list[Answer]:
        length = int.from_bytes(_read(parcel, LENGTH_BYTES), "little")
        answers = msgspec.msgpack.decode(_read(parcel, length), type=list[Answer])
        for answer, where in zip(answers, parcel.places, strict=False):
            if answer.error:
                raise UsageError(f"{where}: {answer.error}")
        return answers

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):  # what it was not told is of no use now
                        stream.close()
            process.wait()


@contextmanager
def workers(setup: Setup, where: str, num_bytes: int) -> Iterator[Workers]:
    """As many as files of so many bytes have use for on this machine, while the block runs."""
    useful = 1 + num_bytes // _WORTH_ONE
    found = Workers(setup, where, max(1, min(8, os.cpu_count() or 1, useful)))
    try:
        yield found
    finally:
        found.close()


def _some_at_a_time(chats: Iterable[tuple[Chat, str]]) -> Iterator[list[tuple[Chat, str]]]:
    source = iter(chats)
    while some := list(islice(source, _AT_ONCE)):
        yield some


def _start() -> subprocess.Popen[bytes]:
    """A child that finds this very package, and nothing in the current folder."""
    root = str(Path(fsdpctl.__file__).parent.parent)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "fsdpctl.data.chats.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": root},
    )


def _send(process: subprocess.Popen[bytes], value: object, where: str) -> None:
    assert process.stdin is not None
    try:
        send(process.stdin, value)
    except BrokenPipeError:
        raise UsageError(f"{where}: the process of the template ended") from None


def _read(parcel: _Parcel, count: int) -> bytes:
    assert parcel.process.stdout is not None
    file, parts, left = parcel.process.stdout.fileno(), [], count
    while left:
        ready, _, _ = select.select([file], [], [], parcel.seconds * _PATIENCE)
        if not ready:
            raise UsageError(f"{parcel.where}: the template does not come to an end")
        part = os.read(file, min(left, 1 << 20))
        if not part:
            raise UsageError(f"{parcel.where}: the process of the template ended: no memory left?")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
