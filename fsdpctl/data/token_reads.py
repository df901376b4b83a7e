"""Tokens in files, which are read piece by piece.

Note: why files are not mapped. A file that is cut while it is mapped kills the process. Reads are
checked instead, and name the file that is cut or replaced.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fsdpctl.errors import UsageError
from fsdpctl.io.files import open_regular

TokenArray = NDArray[np.integer[Any]]
NumpyDtype = np.dtype[Any]
_MOST_OPEN = 32  # files, of the 64 and more that a process may usually open


@dataclass(frozen=True, slots=True)
class DocumentIndex:
    """Numbers in a file from which the ends of documents follow."""

    path: Path
    offset: int  # bytes before them
    count: int  # numbers
    scale: int  # numbers are in units of a `scale`-th token
    selection: tuple[int, int] | None = None  # offset and count of numbers that select from them


@dataclass(frozen=True, slots=True)
class TokenShard:
    """The tokens in a file, and what the file was like when it was opened."""

    is_remote: ClassVar[bool] = False
    path: Path
    dtype: NumpyDtype
    count: int  # tokens
    offset: int  # bytes before them
    stamp: tuple[int, int]  # size and time of change
    index: DocumentIndex | None = None  # of its documents, if known
    loss_mask: "TokenShard | None" = None  # a byte per token, 0 if it is not trained on

    def read(self, start: int, stop: int) -> TokenArray:
        """Return tokens; UsageError if the file has changed since it was opened."""
        size, descriptor = self.dtype.itemsize, _opened(self.path, self.stamp).descriptor
        try:
            if file_stamp(os.stat(self.path)) != self.stamp:  # another file of this name, too
                raise UsageError(f"{self.path}: changed since the run started")
            content = os.pread(descriptor, (stop - start) * size, self.offset + start * size)
        except OSError as error:
            raise UsageError(f"{self.path}: {error.strerror}") from None
        if len(content) != (stop - start) * size:
            raise UsageError(f"{self.path}: cut at byte {self.offset + start * size}")
        return np.frombuffer(content, dtype=self.dtype)

    def fetch(self, start: int, stop: int) -> None:
        """Do nothing: a local file is read when it is needed."""


class _OpenFile:
    """A file that is closed once it is dropped."""

    def __init__(self, path: Path) -> None:
        self.descriptor = open_regular(path, follow_links=True)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


@lru_cache(maxsize=_MOST_OPEN)
def _opened(path: Path, stamp: tuple[int, int]) -> _OpenFile:
    return _OpenFile(path)


def file_stamp(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns


class ShardTokens:
    """The tokens of several files, one file after the other, or a part of them.

    A slice is read when it is taken, as an array.
    """

    def __init__(
        self, shards: Sequence[TokenShard], start: int = 0, stop: int | None = None
    ) -> None:
        self.shards = tuple(shards)
        self._starts = np.cumsum([0, *(each.count for each in shards)], dtype=np.int64)
        self._start = start
        self._stop = int(self._starts[-1]) if stop is None else stop
        self.is_remote = any(each.is_remote for each in shards)
        loss_mask = [
            each.loss_mask for each in shards if each.loss_mask is not None
        ]  # of all shards, or none
        self.flags = ShardTokens(loss_mask, start, stop) if loss_mask else None

    def __len__(self) -> int:
        return self._stop - self._start

    def span(self, start: int, stop: int) -> "ShardTokens":
        return ShardTokens(self.shards, self._start + start, self._start + stop)

    def __getitem__(self, span: slice) -> TokenArray:
        start, stop, _ = span.indices(len(self))
        pieces = [self.shards[n].read(first, last) for n, first, last in self._pieces(start, stop)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.zeros(0, np.uint16)])

    def fetch(self, start: int, stop: int) -> None:
        for number, first, last in self._pieces(start, stop):
            self.shards[number].fetch(first, last)
        if self.flags is not None:
            self.flags.fetch(start, stop)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        at, end = self._start + start, self._start + stop
        number = bisect_right(self._starts, at) - 1
        while at < end:
            begin, after = int(self._starts[number]), int(self._starts[number + 1])
            if at < after:
                yield number, at - begin, min(end, after) - begin
                at = min(end, after)
            number += 1

    def ends(self, start: int, stop: int) -> list[int]:
        """Return where documents end after `start` and up to `stop`; a file is an end, too."""
        found = []
        for number, first, last in self._pieces(start, stop):
            base = int(self._starts[number]) - self._start
            ends = _ends(self.shards[number])
            low, high = np.searchsorted(ends, (first, last), side="right")
            found += [base + int(each) for each in ends[low:high]]
        return found


def _numbers(file: IO[bytes], path: Path, count: int) -> NDArray[np.int64]:
    content = file.read(8 * count)
    if len(content) != 8 * count:
        raise UsageError(f"{path}: cut since the start")
    return np.frombuffer(content, dtype="<i8")


@lru_cache(maxsize=64)
def _ends(shard: TokenShard) -> NDArray[np.int64]:
    about = shard.index
    assert about is not None
    with open(open_regular(about.path, follow_links=True), "rb") as file:
        file.seek(about.offset)
        found = _numbers(file, about.path, about.count)
        if about.selection is not None:
            offset, count = about.selection
            file.seek(offset)
            places = _numbers(file, about.path, count)
            inside = places[(places > 0) & (places < about.count)]
            found = found[inside]
    ends = np.append(found // about.scale, shard.count)
    if (np.diff(ends) < 0).any() or ends[0] < 0:
        raise UsageError(f"{about.path}: damaged: the documents are not in order")
    return ends
