"""Rows near places of files of which the rest is not read.

JSON Lines are read from any place on. Of Parquet, the first rows of row groups are read, and of
other files (compressed, Arrow, CSV, a JSON array) the first rows.
"""

import json
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import BufferedReader, BytesIO
from itertools import accumulate, count, groupby
from pathlib import Path
from typing import Any

from fsdpctl.chats.formats import ChatLine
from fsdpctl.chats.lines import (
    Places,
    is_array,
    is_packed,
    is_table,
    lines_among,
    lines_of,
    object_in,
    objects_in,
    objects_of_table,
    unpacked,
)
from fsdpctl.io.files import MOST_BYTES, open_regular
from fsdpctl.io.untrusted import MIB

_BETWEEN = (*" \t\r\n,",)  # elements of an array
_BLOCK = 4096  # of text that is unfolded; less than it can be lost at the end
Span = tuple[int, int]  # bytes of a file, half-open
_Run = tuple[Places, Callable[[], float], float]  # how far the file is read; bytes to read


def lines_near(path: str, spans: Sequence[Span], prompt: str) -> Iterator[tuple[ChatLine, float]]:
    """Yield rows of a file from each span on, each with its share of the bytes that are read.

    UsageError as `lines_of`.
    """
    name, _ = lines_of(path, prompt=prompt)
    with open(open_regular(Path(path), follows=True), "rb") as raw:
        for objects, tell, most in _runs(path, raw, spans):
            yield from _taken(lines_among(path, name, objects, Counter()), tell, most)


def _taken(
    lines: Iterator[tuple[ChatLine, bytes]], tell: Callable[[], float], most: float
) -> Iterator[tuple[ChatLine, float]]:
    """Yield rows until `most` bytes are read; those of one buffer share its bytes by length."""
    rows, begin = list[tuple[ChatLine, int]](), tell()
    before, stop = begin, begin + most
    for line, content in lines:
        now = tell()
        if rows and now != before:
            yield from _shared(rows, before - begin)
            if before >= stop:
                return
            rows, begin = [], before
        rows.append((line, len(content)))
        before = now
    yield from _shared(rows, tell() - begin)


def _shared(rows: list[tuple[ChatLine, int]], size: float) -> Iterator[tuple[ChatLine, float]]:
    total = sum(length for _, length in rows)
    yield from ((line, size * length / total) for line, length in rows)


def _runs(path: str, raw: BufferedReader, spans: Sequence[Span]) -> Iterator[_Run]:
    start, most = raw.peek(64)[:64], sum(stop - start for start, stop in spans)
    if start.startswith(b"PAR1"):
        yield from _of_parquet(path, raw, spans)
    elif is_table(path, start):
        yield objects_in(path, raw), raw.tell, most
    elif is_packed(start) or is_array(start):
        packed = raw.read(max(most, MIB))  # less could be less than a block
        content = _beginning(path, packed)
        share = len(packed) / len(content)
        if is_array(content[:64]):
            yield *_counted(_elements(path, content, share)), most * share
        else:
            file: BufferedReader = BufferedReader(
                BytesIO(content[: content.rfind(b"\n") + 1] or content)
            )
            yield objects_in(path, file), lambda: file.tell() * share, most * share
    else:
        for begin, end in spans:
            raw.seek(begin)
            if begin:
                raw.readline(MOST_BYTES)  # the rest of a line
            yield objects_in(path, raw, f" after byte {raw.tell():,}"), raw.tell, end - begin


def _beginning(path: str, packed: bytes) -> bytes:
    """Return what the first bytes of a file unfold to, as far as they do."""
    file, found = unpacked(path, BufferedReader(BytesIO(packed))), bytearray()
    with suppress(OSError, EOFError, ValueError):
        while len(found) < MOST_BYTES and (part := file.read(_BLOCK)):
            found += part
    return bytes(found)


def _counted(
    rows: Iterator[tuple[float, str, dict[str, Any]]], begin: float = 0
) -> tuple[Places, Callable[[], float]]:
    """Return objects, and the function that returns where the last one that was taken ends."""
    at = [begin]

    def objects() -> Places:
        for at[0], place, fields in rows:
            yield place, fields

    return objects(), lambda: at[0]


def _elements(
    path: str, content: bytes, share: float
) -> Iterator[tuple[float, str, dict[str, Any]]]:
    """Yield the elements of an array that begins with `content`, and the bytes up to their end."""
    text = content.decode("utf-8", "ignore")
    at, size = text.index("[") + 1, share * len(content) / len(text)
    with suppress(ValueError, RecursionError):  # at the one that is cut
        for number in count(1):
            while text[at : at + 1] in _BETWEEN:
                at += 1
            begin = at
            _, at = json.JSONDecoder().raw_decode(text, begin)
            place = f"element {number}"
            yield at * size, place, object_in(text[begin:at], f"{path}, {place}")


def _of_parquet(path: str, raw: BufferedReader, spans: Sequence[Span]) -> Iterator[_Run]:
    from pyarrow.parquet import ParquetFile

    about = ParquetFile(raw).metadata
    ends = [0, *accumulate(about.row_group(n).num_rows for n in range(about.num_row_groups))]
    size = os.fstat(raw.fileno()).st_size / ends[-1]
    for group, these in groupby(spans, lambda each: bisect_right(ends, each[0] / size) - 1):
        first = ends[group]
        found = objects_of_table(path, raw, is_parquet=True, group=group, number=first)
        rows = ((number * size, *each) for number, each in enumerate(found, first + 1))
        yield *_counted(rows, first * size), sum(stop - start for start, stop in these)
