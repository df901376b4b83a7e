"""Rows near places of a file of which the rest is not read.

JSON Lines are read from any place on. Of Parquet, the first rows of row groups are read, and of
Arrow, CSV and compressed files, the first rows. A JSON array is read whole.
"""

import codecs
import math
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from io import BufferedReader
from itertools import accumulate, groupby, islice
from pathlib import Path
from typing import NamedTuple

from fsdpctl.chats.formats import ChatRow
from fsdpctl.chats.rows import parse_objects, read_objects, read_rows, read_table
from fsdpctl.io.files import MAX_READ_BYTES, open_regular
from fsdpctl.io.untrusted import MIB

ByteSpan = tuple[int, int]  # bytes of a file, half-open
_NEAR = 1 << 13  # bytes before a place that are searched for a line's start, first


class PartialRow(NamedTuple):
    """A row, and the part of it that is at a place."""

    row: ChatRow
    size: float  # of that part, in bytes of the file
    fraction: float = 1.0


def rows_in_spans(path: str, spans: Sequence[ByteSpan], prompt: str) -> Iterator[PartialRow]:
    """Yield the rows at some places of a file. UsageError as `lines_of`.

    A place has parts of the first and the last row. Long rows count by the bytes at places, so that
    one of them does not decide the ratio of tokens to bytes.
    """
    name, _ = read_rows(path, prompt=prompt)
    with open(open_regular(Path(path), follow_links=True), "rb") as raw:
        start = raw.peek(64)[:64].removeprefix(codecs.BOM_UTF8).lstrip()
        if start.startswith(b"PAR1"):
            yield from _of_row_groups(path, name, raw, spans)
        elif start.startswith(b"{") and not path.endswith((".csv", ".tsv")):
            for begin, end in spans:
                raw.seek(line := _line_start(raw, begin))
                yield from _first(path, name, raw, (begin - line, end - line), end - line)
        else:  # less than a MiB can be less than what is decompressed at once
            most = sum(end - begin for begin, end in spans)
            yield from _first(path, name, raw, (0, most), max(most, MIB))


def _line_start(raw: BufferedReader, at: int) -> int:
    size, begin = _NEAR, at
    while begin and size < MAX_READ_BYTES:  # of a line that can be read
        raw.seek(begin := max(0, at - size))
        if end := raw.read(at - begin).rfind(b"\n") + 1:
            return begin + end
        size *= 4
    return begin


def _first(
    path: str, name: str, raw: BufferedReader, span: ByteSpan, read: int
) -> Iterator[PartialRow]:
    """Yield rows of a span of the text that follows.

    At least `read` bytes of the file tell how many of them the text takes.
    """
    begin = before = raw.tell()
    rows, size, kept = list[tuple[ChatRow, int]](), 0, 0
    after = f" after byte {begin:,}" if begin else ""
    for line, content in parse_objects(path, name, read_objects(path, raw, after), Counter()):
        now = raw.tell()  # behind a buffer, which can have several rows
        if size and now != before and before - begin >= read:
            break
        if kept < span[1]:
            rows.append((line, len(content)))
            kept += len(content)
        size += len(content)
        before = now
    else:
        before = os.path.getsize(path)
    scale, at = (before - begin) / max(1, size), 0.0
    start, stop = (each * min(1, scale) for each in span)
    for line, length in rows:
        bytes_here = min(at + length * scale, stop) - max(at, start)
        if bytes_here > 0:
            yield PartialRow(line, bytes_here, bytes_here / (length * scale))
        at += length * scale


def _of_row_groups(
    path: str, name: str, raw: BufferedReader, spans: Sequence[ByteSpan]
) -> Iterator[PartialRow]:
    from pyarrow.parquet import ParquetFile

    about = ParquetFile(raw).metadata
    ends = [0, *accumulate(about.row_group(n).num_rows for n in range(about.num_row_groups))]
    share = os.fstat(raw.fileno()).st_size / ends[-1]
    for group, these in groupby(spans, lambda span: bisect_right(ends, span[0] / share) - 1):
        rows = read_table(path, raw, is_parquet=True, group=group, number=ends[group])
        some = islice(rows, math.ceil(sum(end - begin for begin, end in these) / share))
        lines = parse_objects(path, name, some, Counter())
        yield from (PartialRow(line, share) for line, _ in lines)
