"""Tokens in files, which are read piece by piece.

Note: files are not memory-mapped, because a file that is truncated while it is mapped kills the
process. A read detects truncated and replaced files, and names the file.
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
_MAX_OPEN = 32  # files; a process may usually open at least 64


@dataclass(frozen=True, slots=True)
class DocumentIndex:
    """A table of int64 numbers in a file, from which the ends of documents follow."""

    path: Path
    offset: int  # bytes before the table
    count: int  # numbers in the table
    scale: int  # the numbers are positions of tokens times `scale`
    selection: tuple[int, int] | None = None  # offset and count of indices into the table


@dataclass(frozen=True, slots=True)
class TokenShard:
    """The tokens in a file, and the state of the file when it was opened."""

    is_remote: ClassVar[bool] = False
    path: Path
    dtype: NumpyDtype
    count: int  # tokens
    offset: int  # bytes before the tokens
    stamp: tuple[int, int]  # size and time of change
    index: DocumentIndex | None = None
    loss_mask: "TokenShard | None" = None  # a byte per token; 0: masked

    def read(self, start: int, stop: int) -> TokenArray:
        """Return tokens; UsageError if the file has changed since it was opened."""
        size, descriptor = self.dtype.itemsize, _opened(self.path, self.stamp).descriptor
        try:
            # The path, not the descriptor: another file may have taken the name.
            if file_stamp(os.stat(self.path)) != self.stamp:
                raise UsageError(f"{self.path}: changed since the run started")
            content = os.pread(descriptor, (stop - start) * size, self.offset + start * size)
        except OSError as error:
            raise UsageError(f"{self.path}: {error.strerror}") from None
        if len(content) != (stop - start) * size:
            raise UsageError(f"{self.path}: truncated at byte {self.offset + start * size}")
        return np.frombuffer(content, dtype=self.dtype)

    def fetch(self, start: int, stop: int) -> None:
        """Do nothing: a local file is read when it is needed."""


class _OpenFile:
    """A file descriptor that is closed by the garbage collector."""

    def __init__(self, path: Path) -> None:
        self.descriptor = open_regular(path, follow_links=True)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


@lru_cache(maxsize=_MAX_OPEN)
def _opened(path: Path, stamp: tuple[int, int]) -> _OpenFile:
    return _OpenFile(path)  # `stamp` is a part of the key: a replaced file is opened again


def file_stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


class ShardTokens:
    """The concatenated tokens of several files, or a part of them. Slicing reads an array."""

    def __init__(
        self, shards: Sequence[TokenShard], start: int = 0, stop: int | None = None
    ) -> None:
        self.shards = tuple(shards)
        self._starts = np.cumsum([0, *(each.count for each in shards)], dtype=np.int64)
        self._start = start
        self._stop = int(self._starts[-1]) if stop is None else stop
        self.is_remote = any(each.is_remote for each in shards)
        # Either all shards have a loss mask, or none has.
        masks = [each.loss_mask for each in shards if each.loss_mask is not None]
        self.loss_mask = ShardTokens(masks, start, stop) if masks else None

    def __len__(self) -> int:
        return self._stop - self._start

    def span(self, start: int, stop: int) -> "ShardTokens":
        return ShardTokens(self.shards, self._start + start, self._start + stop)

    def __getitem__(self, span: slice) -> TokenArray:
        start, stop, _ = span.indices(len(self))
        pieces = [self.shards[n].read(first, last) for n, first, last in self._pieces(start, stop)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.zeros(0, np.uint16)])

    def fetch(self, start: int, stop: int) -> None:
        for index, first, last in self._pieces(start, stop):
            self.shards[index].fetch(first, last)
        if self.loss_mask is not None:
            self.loss_mask.fetch(start, stop)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        position, end = self._start + start, self._start + stop
        index = bisect_right(self._starts, position) - 1
        while position < end:
            shard_start, shard_end = int(self._starts[index]), int(self._starts[index + 1])
            if position < shard_end:
                yield index, position - shard_start, min(end, shard_end) - shard_start
                position = min(end, shard_end)
            index += 1

    def ends(self, start: int, stop: int) -> list[int]:
        """Return the ends of documents in (start, stop]; the end of a file counts as one."""
        ends = []
        for index, first, last in self._pieces(start, stop):
            base = int(self._starts[index]) - self._start
            shard_ends = _ends(self.shards[index])
            low, high = np.searchsorted(shard_ends, (first, last), side="right")
            ends += [base + int(each) for each in shard_ends[low:high]]
        return ends


def _numbers(file: IO[bytes], path: Path, count: int) -> NDArray[np.int64]:
    content = file.read(8 * count)
    if len(content) != 8 * count:
        raise UsageError(f"{path}: truncated since the run started")
    return np.frombuffer(content, dtype="<i8")


@lru_cache(maxsize=64)
def _ends(shard: TokenShard) -> NDArray[np.int64]:
    index = shard.index
    assert index is not None
    with open(open_regular(index.path, follow_links=True), "rb") as file:
        file.seek(index.offset)
        table = _numbers(file, index.path, index.count)
        if index.selection is not None:
            offset, count = index.selection
            file.seek(offset)
            selected = _numbers(file, index.path, count)
            valid = selected[(selected > 0) & (selected < index.count)]
            table = table[valid]
    ends = np.append(table // index.scale, shard.count)
    if (np.diff(ends) < 0).any() or ends[0] < 0:
        raise UsageError(f"{index.path}: damaged: the documents are not in order")
    return ends
