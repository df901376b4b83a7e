"""Rows of a file of conversations: JSON, Parquet or Arrow by its first bytes, CSV by its name.

A file is read piece by piece, so neither its size nor its compression ratio matters. Only a JSON
array is read into memory.
"""

import codecs
import csv
import gzip
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from io import BufferedReader
from itertools import chain, count, islice
from pathlib import Path
from typing import IO, Any

import msgspec

from fsdpctl.chats.formats import ChatRow, PlainText, detect_format, needs_value, parse_row
from fsdpctl.chats.messages import is_empty
from fsdpctl.chats.values import clipped
from fsdpctl.config.data import PROMPT_TEMPLATE, TEXT
from fsdpctl.errors import UsageError
from fsdpctl.io.files import MAX_READ_BYTES, open_regular
from fsdpctl.io.packages import import_package
from fsdpctl.io.texts import MIB
from fsdpctl.io.untrusted import parse_json

_JSON_LINE = re.compile(r"line 1 (?=column)")  # the JSON parser counts lines within our line
# The magic number of Zstandard, or of a skippable frame, which pzstd writes.
_ZSTD = re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")
_BATCH = 64  # rows of a table that are read at a time
_TABLE_MAGIC = (b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")  # Parquet, Arrow files and streams
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_EXPECTED = "expected one JSON object per line (.jsonl), a JSON array of objects, or .parquet"
LocatedObjects = Iterator[tuple[str, dict[str, Any]]]  # a position such as `line 3`, and an object


def read_rows(
    path: str, counts: Counter[str] | None = None, prompt: str = PROMPT_TEMPLATE
) -> tuple[str, Iterator[tuple[ChatRow, bytes]]]:
    """Return the format of a file, and an iterator over its rows, each with its content as bytes.

    Rows without text are skipped, and counted as `empty` in `counts`. `prompt` is the setting
    data.prompt, or TEXT_COLUMN to read only the key `text`. UsageError, also during iteration, if
    the file has no rows, or if a row can't be trained on. The message names the file and the row.
    """
    objects = _objects(path)
    first = next(objects, None)
    if first is None:
        raise UsageError(f"{path}: empty; expected at least one row")
    try:
        format_name = detect_format(first[1], prompt)
    except UsageError as error:
        raise UsageError(f"{path}, {first[0]}: {clipped(error)}") from None
    counts = Counter() if counts is None else counts
    return format_name, parse_objects(path, format_name, chain([first], objects), counts)


def first_row(path: str) -> dict[str, Any]:
    """Return the first row of a file, empty if the file has no rows or can't be read."""
    with suppress(UsageError, OSError):
        return next((row for _, row in _objects(path)), {})
    return {}


def check_unambiguous(path: str) -> None:
    """Raise a UsageError if the first row of a file may be either a text or a conversation."""
    fields, format_name = first_row(path), TEXT
    with suppress(UsageError):  # the reader reports an unknown format
        format_name = detect_format(fields)
    if format_name != TEXT and not is_empty(fields.get(TEXT) or ""):
        kinds = f"has text and {format_name.removesuffix(', of messages')}"
        raise UsageError(f"{path}: its first row {kinds}; set data=text or data=chat")


def parse_objects(
    path: str, format_name: str, objects: LocatedObjects, counts: Counter[str]
) -> Iterator[tuple[ChatRow, bytes]]:
    """Yield objects of a file as rows in a format, as `read_rows` does."""
    for position, fields in objects:
        location = f"{path}, {position}"
        try:
            content, keys = parse_row(format_name, fields)
            if isinstance(content, PlainText) and not content.text:
                counts["empty"] += 1
                continue
            row = ChatRow(content, location, keys)
            row_bytes = row.to_bytes()
        except UsageError as error:
            raise UsageError(f"{location}: {clipped(error)}") from None
        except UnicodeEncodeError:
            raise UsageError(f"{location}: contains a lone surrogate") from None
        yield row, row_bytes


def _objects(path: str) -> LocatedObjects:
    with open(open_regular(Path(path), follow_links=True), "rb") as raw:
        yield from read_objects(path, raw)


def read_objects(path: str, raw: BufferedReader, after: str = "") -> LocatedObjects:
    """Yield the objects of a file from `raw`'s position on; in messages, `after` follows lines."""
    start = raw.peek(8)[:8]
    if start.startswith(_TABLE_MAGIC):
        yield from read_table(path, raw, is_parquet=start.startswith(b"PAR1"))
        return
    if path.endswith((".csv", ".tsv")):
        yield from read_csv(path, raw)
        return
    file: IO[bytes] = raw
    if start.startswith(b"\x1f\x8b"):
        file = BufferedReader(gzip.GzipFile(fileobj=raw))
    elif _ZSTD.match(start):
        file = BufferedReader(import_package("pyarrow", path).CompressedInputStream(raw, "zstd"))
    reader = _Reader(path, file, after)
    start = reader.call("peek", 64)
    if start.startswith(_UTF16_MARKS):
        raise UsageError(f"{path}: UTF-16: not supported; expected UTF-8")
    is_array = start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    for position, content in _elements(reader) if is_array else _text_lines(reader):
        yield position, _object(content, f"{path}, {position}")


class _Reader:
    """A file, compressed or not, whose errors name the current line."""

    def __init__(self, path: str, file: Any, after: str = "") -> None:
        self.path, self.position, self.after, self._file = path, "line 1", after, file

    def call(self, method: str, size: int) -> bytes:
        try:
            return bytes(getattr(self._file, method)(size))
        except (OSError, EOFError, ValueError, zlib.error) as error:  # ValueError: by pyarrow
            raise self.error(f"cannot be read: {' '.join(str(error).split()):.200}") from None

    def check_size(self, content: bytes, hint: str) -> None:
        if len(content) > MAX_READ_BYTES:
            raise self.error(f"larger than the limit of {MAX_READ_BYTES >> 20:,} MiB; {hint}")

    def error(self, problem: str) -> UsageError:
        return UsageError(f"{self.path}, {self.position}: {problem}")


def _text_lines(reader: _Reader) -> Iterator[tuple[str, str]]:
    for number in count(1):
        reader.position = f"line {number}{reader.after}"
        line = reader.call("readline", MAX_READ_BYTES + 1)
        if not line:
            return
        reader.check_size(line, _EXPECTED)
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not line.strip():
            continue
        try:
            # Without the line break, since JSON errors at the end would name the next line.
            yield reader.position, line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            hint = f"; {_EXPECTED}" if number == 1 else ""
            problem = f"not UTF-8: {error.reason} at byte {error.start + 1}{hint}"
            raise reader.error(problem) from None


def _elements(reader: _Reader) -> Iterator[tuple[str, str]]:
    reader.position = "array"
    # In pieces: one read of the limit would allocate all that memory.
    pieces = iter(lambda: reader.call("read", MIB), b"")
    content = b"".join(islice(pieces, MAX_READ_BYTES // MIB + 1)).removeprefix(codecs.BOM_UTF8)
    reader.check_size(content, "convert it to JSON Lines")
    try:
        elements = msgspec.json.decode(content, type=list[msgspec.Raw])
        for number, element in enumerate(elements, start=1):
            yield f"element {number}", bytes(element).decode()
    except (ValueError, RecursionError) as error:
        raise reader.error(f"not JSON: {error}") from None


def _object(text: str, location: str) -> dict[str, Any]:
    try:
        return parse_json(text, dict[str, Any], "")
    except UsageError as error:
        # A lone { begins an object of several lines, so the hint applies.
        is_object = text.strip() != "{" and text.lstrip().startswith("{")
        hint = "" if is_object else f"; {_EXPECTED}"
        problem = clipped(_JSON_LINE.sub("", str(error).removeprefix(": ")))
        raise UsageError(f"{location}: {problem}{hint}") from None


def read_table(
    path: str, raw: IO[bytes], *, is_parquet: bool, group: int | None = None, rows_before: int = 0
) -> LocatedObjects:
    """Yield the rows of a table, or of one row group that follows `rows_before` rows.

    Columns that no format uses are not read: their value is True in all rows, so that the note
    on unused keys names them. UsageError if the file is damaged.
    """
    arrow = import_package("pyarrow", path)
    try:
        names, batches = _parquet(raw, group) if is_parquet else _arrow(arrow, raw)
        _check_columns(path, names)
        unused = {name: True for name in names if not needs_value(name)}
        for batch in batches:
            selected = batch.select([n for n in names if n not in unused])
            for row in selected.to_pylist() if selected.num_columns else [{}] * selected.num_rows:
                rows_before += 1
                yield f"row {rows_before}", {**unused, **row}
    except (arrow.ArrowException, OSError, ValueError) as error:
        reason = f"{' '.join(str(error).split()):.200}"
        raise UsageError(f"{path}, row {rows_before + 1}: cannot be read: {reason}") from None


def _check_columns(path: str, names: list[str]) -> None:
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise UsageError(f"{path}: column {repeated[0]}: appears twice; rename one of them")


def read_csv(path: str, raw: IO[bytes]) -> LocatedObjects:
    """Yield the rows of a CSV or TSV file, whose first line has the names of columns."""
    csv.field_size_limit(MAX_READ_BYTES)
    text = codecs.iterdecode(raw, "utf-8-sig")
    rows = csv.reader(text, delimiter="\t" if path.endswith(".tsv") else ",", strict=True)
    try:
        names = next(rows, [])
        _check_columns(path, names)
        for number, row in enumerate(filter(None, rows), start=1):
            if len(row) != len(names):
                problem = f"{len(row)} values for the columns {', '.join(names):.100}"
                raise UsageError(f"{path}, row {number}: {problem}")
            yield f"row {number}", dict(zip(names, row, strict=True))
    except (csv.Error, ValueError) as error:
        line = rows.line_num + (not isinstance(error, csv.Error))  # a line that was decoded counts
        raise UsageError(f"{path}, line {line}: cannot be read: {error}") from None


def _parquet(raw: IO[bytes], group: int | None) -> tuple[list[str], Iterator[Any]]:
    from pyarrow.parquet import ParquetFile

    # With pre_buffer, whole row groups would be read into memory.
    file = ParquetFile(raw, buffer_size=MIB, pre_buffer=False)
    names, groups = file.schema_arrow.names, None if group is None else [group]
    return names, file.iter_batches(_BATCH, groups, [name for name in names if needs_value(name)])


def _arrow(arrow: Any, raw: IO[bytes]) -> tuple[list[str], Iterator[Any]]:
    if raw.peek(6).startswith(b"ARROW1"):  # type: ignore[attr-defined]
        file = arrow.ipc.open_file(raw)
        return file.schema.names, (file.get_batch(n) for n in range(file.num_record_batches))
    stream = arrow.ipc.open_stream(raw)
    return stream.schema.names, iter(stream)
