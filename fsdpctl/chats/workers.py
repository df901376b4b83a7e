"""The processes that run templates, and the rows that are sent through them, in order."""

import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

import msgspec

import fsdpctl
from fsdpctl.chats.child import LENGTH_BYTES, Answer, Setup, send
from fsdpctl.chats.rows import Chat
from fsdpctl.chats.samples import Made
from fsdpctl.errors import UsageError

MOST_SECONDS, MOST_BYTES = 10.0, 2 << 30  # for a row; a long one takes a hundredth of either
_PATIENCE = 20  # times MOST_SECONDS by the clock, on a busy machine, before a process is given up
_PARCEL = 32  # chats
_WORTH_ONE = 1 << 19  # bytes, that take about as long as a process takes to begin


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
                self._answers(process, [where])
        except BaseException:
            self.close()
            raise

    def results(self, chats: Iterable[tuple[Chat, str]]) -> Iterator[Made]:
        """What each of the chats becomes, in their order; the text is where one is from.

        Raises:
            UsageError: the template refuses one, or its turns are not found; begins with where.
        """
        # A process has one parcel at a time: while it writes an answer, nobody writes to it.
        waiting: deque[tuple[subprocess.Popen[bytes], list[str]]] = deque()
        for number, parcel in enumerate(_parcels(chats)):
            if len(waiting) == len(self._processes):
                yield from self._made(*waiting.popleft())
            process = self._processes[number % len(self._processes)]
            places = [where for _, where in parcel]
            _send(process, [chat for chat, _ in parcel], places[0])
            waiting.append((process, places))
        while waiting:
            yield from self._made(*waiting.popleft())

    def _made(self, process: subprocess.Popen[bytes], places: list[str]) -> Iterator[Made]:
        return (each.made for each in self._answers(process, places) if each.made is not None)

    def _answers(self, process: subprocess.Popen[bytes], places: list[str]) -> list[Answer]:
        limit = self._setup.most_seconds * _PATIENCE
        length = int.from_bytes(_read(process, LENGTH_BYTES, limit, places[0]), "little")
        content = _read(process, length, limit, places[0])
        answers = msgspec.msgpack.decode(content, type=list[Answer])
        for answer, where in zip(answers, places, strict=False):
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


def _parcels(chats: Iterable[tuple[Chat, str]]) -> Iterator[list[tuple[Chat, str]]]:
    source = iter(chats)
    while parcel := list(islice(source, _PARCEL)):
        yield parcel


def _start() -> subprocess.Popen[bytes]:
    """A child that finds this very package, and nothing in the current folder."""
    root = str(Path(fsdpctl.__file__).parent.parent)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "fsdpctl.chats.child"],
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


def _read(process: subprocess.Popen[bytes], count: int, limit: float, where: str) -> bytes:
    assert process.stdout is not None
    file, parts, left = process.stdout.fileno(), [], count
    while left:
        ready, _, _ = select.select([file], [], [], limit)
        if not ready:
            raise UsageError(f"{where}: the template does not come to an end")
        part = os.read(file, min(left, 1 << 20))
        if not part:
            raise UsageError(f"{where}: the process of the template ended: too little memory?")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
