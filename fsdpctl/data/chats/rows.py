"""Rows of a file of conversations: JSON Lines, a JSON array, Parquet or Arrow, as its bytes say.

A file is read piece by piece, however long it is, and however far its compression unfolds.
"""

import codecs
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import IO, Any

from fsdpctl.data.chats.formats import ChatLine, Plain, detect_format, parse_row
from fsdpctl.data.chats.tables import objects_of_table, open_zstd
from fsdpctl.data.chats.values import shown
from fsdpctl.errors import UsageError
from fsdpctl.io.files import open_regular
from fsdpctl.io.untrusted import MIB, parse_json

MOST_ROW = 8 * MIB  # bytes; about two million tokens
_PIECE = 1 << 16  # bytes of an array that are read at a time
_MOST_BLANK = 1 << 18  # bytes of empty lines in a row
_JSON_LINE = re.compile(r"line 1 (?=column)")  # the JSON parser counts lines within our line
_BLANK = (" ", "\t", "\r", "\n")
_ZSTD = re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")  # or a frame to skip, as of pzstd
_TABLES = (b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")
_WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_EXPECTED = "expected one JSON object per line (.jsonl), a JSON array of objects, or .parquet"
_Places = Iterator[tuple[str, dict[str, Any]]]  # such as `line 3`, and the object there


def lines_of(
    path: str, counts: Counter[str] | None = None
) -> tuple[str, Iterator[tuple[ChatLine, bytes]]]:
    """Return the format of a file, and its rows, each with its content as bytes.

    Rows without text are passed over, and counted as `empty`.

    Raises:
        UsageError: Also during iteration: if the file has no rows, or if a row can't be trained
            on. The message names the file and the line, row or element.
    """
    found = _objects(path)
    first = next(found, None)
    if first is None:
        raise UsageError(f"{path}: empty; expected at least one row")
    try:
        name = detect_format(first[1])
    except UsageError as error:
        raise UsageError(f"{path}, {first[0]}: {shown(error)}") from None
    return name, _lines(path, name, chain([first], found), Counter() if counts is None else counts)


def _lines(
    path: str, name: str, found: _Places, counts: Counter[str]
) -> Iterator[tuple[ChatLine, bytes]]:
    for place, fields in found:
        where = f"{path}, {place}"
        try:
            content, keys = parse_row(name, fields)
            if isinstance(content, Plain) and not content.text:
                counts["empty"] += 1
                continue
            line = ChatLine(content, where, keys)
            as_bytes = line.to_bytes()
        except UsageError as error:
            raise UsageError(f"{where}: {shown(error)}") from None
        except UnicodeEncodeError:
            raise UsageError(f"{where}: contains half of a surrogate pair") from None
        yield line, as_bytes


def _objects(path: str) -> _Places:
    with open(open_regular(Path(path), follows=True), "rb") as raw:
        start = raw.peek(8)[:8]
        if start.startswith(_TABLES):
            yield from objects_of_table(path, raw, MOST_ROW, is_parquet=start.startswith(b"PAR1"))
            return
        file: IO[bytes] = raw
        if start.startswith(b"\x1f\x8b"):
            file = BufferedReader(gzip.GzipFile(fileobj=raw))
        elif _ZSTD.match(start):
            file = BufferedReader(open_zstd(path, raw))
        read = _Reader(path, file)
        start = read.call("peek", 64)
        if start.startswith(_WIDE):
            raise UsageError(f"{path}: UTF-16: not supported; expected UTF-8")
        is_array = start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
        for place, content in _elements(read) if is_array else _text_lines(read):
            yield place, _object(content, f"{path}, {place}")


class _Reader:
    """A file, compressed or not, whose errors name the place in it."""

    def __init__(self, path: str, file: Any) -> None:
        self.path, self.place, self._file = path, "line 1", file

    def call(self, method: str, size: int) -> bytes:
        try:
            return bytes(getattr(self._file, method)(size))
        except (OSError, EOFError, ValueError, zlib.error) as error:  # ValueError: of pyarrow
            raise self.error(f"cannot be read: {' '.join(str(error).split()):.200}") from None

    def error(self, problem: str) -> UsageError:
        return UsageError(f"{self.path}, {self.place}: {problem}")


def _text_lines(read: _Reader) -> Iterator[tuple[str, str]]:
    number = blank = 0
    while True:
        number += 1
        read.place = f"line {number}"
        line = read.call("readline", MOST_ROW + 1)
        if not line:
            return
        if len(line) > MOST_ROW:
            raise read.error(f"longer than the limit of {MOST_ROW >> 20} MiB; {_EXPECTED}")
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        blank = 0 if line.strip() else blank + len(line)
        if blank > _MOST_BLANK:
            raise read.error(f"more than {_MOST_BLANK >> 10} KiB of empty lines")
        if blank:
            continue
        try:
            yield read.place, line.decode("utf-8").rstrip("\r\n")  # errors at the end name no line
        except UnicodeDecodeError as error:
            hint = f"; {_EXPECTED}" if number == 1 else ""
            raise read.error(f"not UTF-8: {error.reason} at byte {error.start + 1}{hint}") from None


def _elements(read: _Reader) -> Iterator[tuple[str, str]]:
    """Yield the text of each element of a JSON array."""
    array, number = _Array(read), 0
    array.take("[")
    mark = "," if array.next() != "]" else array.take("]")
    while mark == ",":
        number += 1
        read.place = f"element {number}"
        yield read.place, array.element()
        mark = array.take(",]")
    if array.next():
        raise read.error("text after the array; expected its end")


class _Array:
    """The text of a JSON array, of which a piece and an element are in memory."""

    def __init__(self, read: _Reader) -> None:
        self._read, self._text, self._at = read, "", 0
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._scan = json.JSONDecoder().raw_decode

    def next(self) -> str:
        """Return the next character that is not blank; empty at the end of the file."""
        for _ in range(_MOST_BLANK // _PIECE):
            while self._text[self._at : self._at + 1] in _BLANK:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._reads_on(_PIECE):
                return ""
        raise self._read.error(f"more than {_MOST_BLANK >> 10} KiB of blanks")

    def take(self, expected: str) -> str:
        """Take the next character, which must be one of these, and return it."""
        found = self.next()
        if not found or found not in expected:
            got = f"got {found}" if found else "got the end of the file"
            raise self._read.error(f"not JSON: expected {' or '.join(expected)}, {got}")
        self._at += 1
        return found

    def element(self) -> str:
        """Return the text of an object, or the rest of the file if it is damaged."""
        if self.next() != "{":
            raise self._read.error("expected a JSON object")
        while True:
            try:
                end = self._scan(self._text, self._at)[1]
            except (ValueError, RecursionError):  # also if it is not complete
                end = len(self._text)
                if end - self._at <= MOST_ROW and self._reads_on(max(_PIECE, end - self._at)):
                    continue
            text, self._at = self._text[self._at : end], end
            return text

    def _reads_on(self, size: int) -> bool:
        piece = self._read.call("read", size)
        try:
            more = self._decode(piece, not piece)
        except UnicodeDecodeError as error:
            raise self._read.error(f"not UTF-8: {error.reason}") from None
        self._text, self._at = self._text[self._at :] + more, 0
        return bool(piece)


def _object(text: str, where: str) -> dict[str, Any]:
    if len(text) > MOST_ROW:
        raise UsageError(f"{where}: damaged, or longer than the limit of {MOST_ROW >> 20} MiB")
    try:
        return parse_json(text, dict[str, Any], "")
    except UsageError as error:
        is_object = text.strip() != "{" and text.lstrip().startswith("{")
        hint = "" if is_object else f"; {_EXPECTED}"
        problem = shown(_JSON_LINE.sub("", str(error).removeprefix(": ")))
        raise UsageError(f"{where}: {problem}{hint}") from None
