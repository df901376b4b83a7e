"""Rows in some byte spans of a file, without reading the rest of the file.

JSON Lines are read from any byte on. From Parquet files, the first rows of row groups are read,
and from Arrow, CSV and compressed files, the first rows of the file. JSON arrays are read in full.
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
from fsdpctl.io.texts import MIB

ByteSpan = tuple[int, int]  # bytes of a file, half-open
_FIRST_STEP = 1 << 13  # bytes before a span that are first searched for the start of a line


class PartialRow(NamedTuple):
    """A row, and how much of the row is in a span."""

    row: ChatRow
    size: float  # bytes of the file in the span
    fraction: float = 1.0  # share of the row in the span


def rows_in_spans(path: str, spans: Sequence[ByteSpan], prompt: str) -> Iterator[PartialRow]:
    """Yield the rows that overlap byte spans of a file. UsageError as in `read_rows`.

    A span cuts its first and its last row. Rows are weighted by the bytes within spans, so that a
    long row does not decide the ratio of tokens to bytes.
    """
    format_name, _ = read_rows(path, prompt=prompt)
    with open(open_regular(Path(path), follow_links=True), "rb") as raw:
        start = raw.peek(64)[:64].removeprefix(codecs.BOM_UTF8).lstrip()
        if start.startswith(b"PAR1"):
            yield from _rows_of_groups(path, format_name, raw, spans)
        elif start.startswith(b"{") and not path.endswith((".csv", ".tsv")):
            for begin, end in spans:
                raw.seek(line := _line_start(raw, begin))
                span = begin - line, end - line
                yield from _rows_from_position(path, format_name, raw, span, end - line)
        else:  # at least a MiB, since decompression reads that many bytes at once
            total = sum(end - begin for begin, end in spans)
            yield from _rows_from_position(path, format_name, raw, (0, total), max(total, MIB))


def _line_start(raw: BufferedReader, position: int) -> int:
    size, begin = _FIRST_STEP, position
    while begin and size < MAX_READ_BYTES:  # longer lines can't be read
        raw.seek(begin := max(0, position - size))
        if end := raw.read(position - begin).rfind(b"\n") + 1:
            return begin + end
        size *= 4
    return begin


def _rows_from_position(
    path: str, format_name: str, raw: BufferedReader, span: ByteSpan, min_bytes: int
) -> Iterator[PartialRow]:
    """Yield the rows within `span` of the text that begins at the position of `raw`.

    At least `min_bytes` are read, to measure the ratio of the file's bytes to the text's bytes.
    """
    begin = last_position = raw.tell()
    rows, text_bytes, kept_bytes = list[tuple[ChatRow, int]](), 0, 0
    after = f" after byte {begin:,}" if begin else ""
    objects = read_objects(path, raw, after)
    for row, row_bytes in parse_objects(path, format_name, objects, Counter()):
        buffer_end = raw.tell()  # a buffer may have several rows
        if text_bytes and buffer_end != last_position and last_position - begin >= min_bytes:
            break
        if kept_bytes < span[1]:
            rows.append((row, len(row_bytes)))
            kept_bytes += len(row_bytes)
        text_bytes += len(row_bytes)
        last_position = buffer_end
    else:  # all rows were read
        last_position = os.path.getsize(path)
    scale = (last_position - begin) / max(1, text_bytes)  # bytes of the file per byte of text
    position = 0.0
    # In a compressed file, `span` counts bytes of text.
    start, stop = (each * min(1, scale) for each in span)
    for row, length in rows:
        num_bytes = min(position + length * scale, stop) - max(position, start)
        if num_bytes > 0:
            yield PartialRow(row, num_bytes, num_bytes / (length * scale))
        position += length * scale


def _rows_of_groups(
    path: str, format_name: str, raw: BufferedReader, spans: Sequence[ByteSpan]
) -> Iterator[PartialRow]:
    from pyarrow.parquet import ParquetFile

    metadata = ParquetFile(raw).metadata
    # The spans are in order, as `groupby` requires.
    counts = (metadata.row_group(n).num_rows for n in range(metadata.num_row_groups))
    starts = [0, *accumulate(counts)]
    row_size = os.fstat(raw.fileno()).st_size / starts[-1]
    for group, group_spans in groupby(spans, lambda x: bisect_right(starts, x[0] / row_size) - 1):
        objects = read_table(path, raw, is_parquet=True, group=group, rows_before=starts[group])
        num_rows = math.ceil(sum(end - begin for begin, end in group_spans) / row_size)
        rows = parse_objects(path, format_name, islice(objects, num_rows), Counter())
        yield from (PartialRow(row, row_size) for row, _ in rows)
