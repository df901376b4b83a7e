"""Files of conversations: which ones, with which shares, and their lines one after another."""

import gzip
import math
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

import xxhash

from fsdpctl.data.chats.formats import FormatError, recognised, row_of
from fsdpctl.data.chats.rows import Line, content_of
from fsdpctl.errors import UsageError
from fsdpctl.io.documents import MIB, parse_json
from fsdpctl.io.files import open_regular

MOST_LINE = 8 * MIB  # bytes; some two million tokens
_AT_ONCE = 1 << 22
_JSON_LINE = re.compile(r"line 1 (?=column)")  # of a line there is only one
_PARQUET = ".parquet"


@dataclass(frozen=True, slots=True)
class Source:
    """A file, and its share of an epoch's conversations; None: as many as it has."""

    path: str
    share: float | None = None


def sources_of(text: str, key: str = "data.path") -> tuple[Source, ...]:
    """The files that a key names: FILE, or FILE:SHARE,FILE:SHARE, in brackets if one likes.

    Shares are made to add up to one.

    Raises:
        UsageError: a file is missing, or only some have a share.
    """
    if os.path.exists(text):
        return (_existing(text, None, key),)
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1]
    found = [_source(word.strip(), key) for word in inner.split(",") if word.strip()]
    if not found:
        raise UsageError(f"{key}={text}: names no file")
    shares = [each.share for each in found if each.share is not None]
    if shares and len(shares) < len(found):
        missing = next(each.path for each in found if each.share is None)
        raise UsageError(f"{key}={text}: {missing} has no share: give all of them one, or none")
    if len(found) == 1 or not shares:
        return tuple(Source(each.path) for each in found)
    return tuple(Source(each.path, (each.share or 0) / sum(shares)) for each in found)


def _source(word: str, key: str) -> Source:
    path, colon, share = word.rpartition(":")
    if os.path.exists(os.path.expanduser(word)) or not colon:
        return _existing(word, None, key)
    try:
        number = float(share)
    except ValueError:
        return _existing(word, None, key)
    if not (math.isfinite(number) and number > 0):
        raise UsageError(f"{key}: {word}: a share is a number above 0")
    return _existing(path, number, key)


def _existing(path: str, share: float | None, key: str) -> Source:
    path = os.path.expanduser(path)
    if not os.path.isfile(path):
        what = "a directory; name its files" if os.path.isdir(path) else "no such file"
        raise UsageError(f"{key}={path}: {what}")
    return Source(path, share)


def absolute_paths(text: str, key: str = "data.path") -> str:
    """The same text with every file's path made absolute."""
    found = sources_of(text, key)
    if len(found) == 1:
        return os.path.abspath(found[0].path)
    return ",".join(
        os.path.abspath(each.path) + ("" if each.share is None else f":{each.share!r}")
        for each in found
    )


def files_checksum(sources: tuple[Source, ...]) -> str:
    """Identifies the files' contents and shares."""
    digest = xxhash.xxh3_128()
    for source in sources:
        digest.update(f"{source.share!r} {source.path.endswith(_PARQUET)};".encode())
        with open(open_regular(Path(source.path), follows=True), "rb") as file:
            size = 0
            while part := file.read(_AT_ONCE):
                digest.update(part)
                size += len(part)
        digest.update(size.to_bytes(8, "little"))
    return digest.hexdigest()


def lines_of(path: str) -> tuple[str, Iterator[tuple[Line, bytes]]]:
    """The format of a file's first line, and all its lines with what identifies their contents.

    Raises:
        UsageError: (also while they are read) a line cannot be trained on, or there is none; the
            message names file and line.
    """
    found = _objects(path)
    first = next(found, None)
    if first is None:
        raise UsageError(f"{path}: there is no line in it")
    try:
        name = recognised(first[1])
    except FormatError as error:
        raise UsageError(f"{path}, line {first[0]}: {error}") from None
    return name, _lines(path, name, chain([first], found))


def _lines(
    path: str, name: str, found: Iterator[tuple[int, dict[str, Any]]]
) -> Iterator[tuple[Line, bytes]]:
    for number, fields in found:
        try:
            line = Line(row_of(name, fields), path, number)
            yield line, content_of(line.row)
        except FormatError as error:
            raise UsageError(f"{path}, line {number}: {error}") from None
        except UnicodeEncodeError:
            raise UsageError(f"{path}, line {number}: half of a surrogate pair in it") from None


def _objects(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects in a file, with the numbers of their lines (or rows), from one."""
    if path.endswith(_PARQUET):
        from fsdpctl.data.chats.parquet import objects_of_parquet

        yield from objects_of_parquet(path)
        return
    with open(open_regular(Path(path), follows=True), "rb") as raw:
        is_packed = raw.peek(2)[:2] == b"\x1f\x8b"
        file: IO[bytes] = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if is_packed else raw
        number = 0
        while True:
            number += 1
            where = f"{path}, line {number}"
            try:
                line = file.readline(MOST_LINE + 1)
            except (OSError, EOFError, zlib.error) as error:
                raise UsageError(f"{where}: cannot be read: {error}") from None
            if not line:
                return
            if len(line) > MOST_LINE:
                raise UsageError(f"{where}: longer than the {MOST_LINE >> 20} MiB of a line")
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield number, _object(line, where)


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        text = line.decode("utf-8").rstrip("\r\n")  # else it would speak of a second line
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: not UTF-8: {error.reason} at byte {error.start + 1}") from None
    try:
        return parse_json(text, dict[str, Any], where)
    except UsageError as error:
        raise UsageError(_JSON_LINE.sub("", str(error))) from None
