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

from fsdpctl.chats.formats import ChatLine
from fsdpctl.chats.lines import lines_among, lines_of, objects_in, objects_of_table
from fsdpctl.io.files import MOST_BYTES, open_regular
from fsdpctl.io.untrusted import MIB

Span = tuple[int, int]  # bytes of a file, half-open
_Shares = Iterator[tuple[ChatLine, float]]  # rows, and the bytes of the file that each takes


def lines_near(path: str, spans: Sequence[Span], prompt: str) -> _Shares:
    """Yield rows near some places of a file, each with its share of the file's bytes.

    UsageError as `lines_of`.
    """
    name, _ = lines_of(path, prompt=prompt)
    with open(open_regular(Path(path), follows=True), "rb") as raw:
        start = raw.peek(64)[:64].removeprefix(codecs.BOM_UTF8).lstrip()
        if start.startswith(b"PAR1"):
            yield from _of_row_groups(path, name, raw, spans)
        elif start.startswith(b"{") and not path.endswith((".csv", ".tsv")):
            for begin, end in spans:
                raw.seek(begin)
                if begin:
                    raw.readline(MOST_BYTES)  # the rest of a line
                yield from _first(path, name, raw, end - begin, end - begin)
        else:  # less than a MiB can be less than what is decompressed at once
            most = sum(end - begin for begin, end in spans)
            yield from _first(path, name, raw, most, max(most, MIB))


def _first(path: str, name: str, raw: BufferedReader, most: int, read: int) -> _Shares:
    """Yield rows with `most` bytes of text; at least `read` bytes of the file tell their shares."""
    begin = before = raw.tell()
    rows, size, kept = list[tuple[ChatLine, int]](), 0, 0
    after = f" after byte {begin:,}" if begin else ""
    for line, content in lines_among(path, name, objects_in(path, raw, after), Counter()):
        now = raw.tell()  # behind a buffer, which can have several rows
        if size and now != before and before - begin >= read:
            break
        if kept < most:
            rows.append((line, len(content)))
            kept += len(content)
        size += len(content)
        before = now
    else:
        before = os.path.getsize(path)
    yield from ((line, (before - begin) * length / size) for line, length in rows)


def _of_row_groups(path: str, name: str, raw: BufferedReader, spans: Sequence[Span]) -> _Shares:
    from pyarrow.parquet import ParquetFile

    about = ParquetFile(raw).metadata
    ends = [0, *accumulate(about.row_group(n).num_rows for n in range(about.num_row_groups))]
    share = os.fstat(raw.fileno()).st_size / ends[-1]
    for group, these in groupby(spans, lambda span: bisect_right(ends, span[0] / share) - 1):
        rows = objects_of_table(path, raw, is_parquet=True, group=group, number=ends[group])
        some = islice(rows, math.ceil(sum(end - begin for begin, end in these) / share))
        yield from ((line, share) for line, _ in lines_among(path, name, some, Counter()))
