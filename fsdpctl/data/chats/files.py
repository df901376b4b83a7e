"""Files of conversations: which ones, their lines, and how an epoch is made of them.

A hash of a conversation's content decides whether it is held out for validation and how often it is
repeated. New data therefore moves no conversation between training and validation.
"""

import gzip
import math
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from fsdpctl.data.chats.formats import ChatLine, detect_format, parse_line
from fsdpctl.errors import UsageError
from fsdpctl.io.documents import MIB, parse_json
from fsdpctl.io.files import open_regular

MOST_LINE = 8 * MIB  # bytes; about two million tokens
_CHUNK_BYTES = 1 << 22
_PARQUET_ROWS = 256  # converted at a time
_JSON_LINE = re.compile(r"line 1 (?=column)")  # the JSON parser counts lines within our line
_PARQUET = ".parquet"
_PART_SEED, _REPEAT_SEED = 1, 2  # makes the two decisions independent of each other


@dataclass(frozen=True, slots=True)
class ChatSource:
    """A file and its share of an epoch's conversations; None means all of its conversations."""

    path: str
    share: float | None = None


def sources_of(text: str, key: str = "data.path") -> tuple[ChatSource, ...]:
    """Return the files that a key names: FILE or FILE:SHARE,FILE:SHARE, with optional brackets.

    Shares are normalized to a sum of one.

    Raises:
        UsageError: If a file is missing, or if only some of the files have a share.
    """
    if os.path.exists(text):
        return (_existing(text, None, key),)
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1]
    found = [_source(word.strip(), key) for word in inner.split(",") if word.strip()]
    if not found:
        raise UsageError(f"{key}={text}: expected at least one file")
    shares = [each.share for each in found if each.share is not None]
    if shares and len(shares) < len(found):
        missing = next(each.path for each in found if each.share is None)
        raise UsageError(
            f"{key}={text}: {missing} has no share; give a share for all files or none"
        )
    if len(found) == 1 or not shares:
        return tuple(ChatSource(each.path) for each in found)
    return tuple(ChatSource(each.path, (each.share or 0) / sum(shares)) for each in found)


def _source(word: str, key: str) -> ChatSource:
    path, colon, share = word.rpartition(":")
    if os.path.exists(os.path.expanduser(word)) or not colon:
        return _existing(word, None, key)
    try:
        number = float(share)
    except ValueError:
        return _existing(word, None, key)
    if not (math.isfinite(number) and number > 0):
        raise UsageError(f"{key}: {word}: expected a share above 0")
    return _existing(path, number, key)


def _existing(path: str, share: float | None, key: str) -> ChatSource:
    path = os.path.expanduser(path)
    if not os.path.isfile(path):
        what = "is a directory; name its files" if os.path.isdir(path) else "no such file"
        raise UsageError(f"{key}={path}: {what}")
    return ChatSource(path, share)


def absolute_paths(text: str, key: str = "data.path") -> str:
    """Return `text` with the path of each file made absolute."""
    found = sources_of(text, key)
    if len(found) == 1:
        return os.path.abspath(found[0].path)
    return ",".join(
        os.path.abspath(each.path) + ("" if each.share is None else f":{each.share!r}")
        for each in found
    )


def files_checksum(sources: Sequence[ChatSource]) -> str:
    """Return a checksum of the contents and shares of files."""
    digest = xxhash.xxh3_128()
    for source in sources:
        digest.update(f"{source.share!r} {source.path.endswith(_PARQUET)};".encode())
        with open(open_regular(Path(source.path), follows=True), "rb") as file:
            size = 0
            while part := file.read(_CHUNK_BYTES):
                digest.update(part)
                size += len(part)
        digest.update(size.to_bytes(8, "little"))
    return digest.hexdigest()


def lines_of(path: str) -> tuple[str, Iterator[tuple[ChatLine, bytes]]]:
    """Return the format of a file, and its lines, each with its content as bytes.

    Raises:
        UsageError: Also during iteration: if the file has no lines, or if a line can't be trained
            on. The message names the file and the line.
    """
    found = _objects(path)
    first = next(found, None)
    if first is None:
        raise UsageError(f"{path}: empty; expected at least one line")
    try:
        name = detect_format(first[1])
    except UsageError as error:
        raise UsageError(f"{path}, line {first[0]}: {error}") from None
    return name, _lines(path, name, chain([first], found))


def _lines(
    path: str, name: str, found: Iterator[tuple[int, dict[str, Any]]]
) -> Iterator[tuple[ChatLine, bytes]]:
    for number, fields in found:
        try:
            line = ChatLine(parse_line(name, fields), path, number)
            content = line.to_bytes()
        except UsageError as error:
            raise UsageError(f"{path}, line {number}: {error}") from None
        except UnicodeEncodeError:
            raise UsageError(f"{path}, line {number}: contains half of a surrogate pair") from None
        yield line, content


def _objects(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects in a file with their line (or row) numbers, starting at 1."""
    if path.endswith(_PARQUET):
        yield from _objects_of_parquet(path)
        return
    with open(open_regular(Path(path), follows=True), "rb") as raw:
        is_compressed = raw.peek(2)[:2] == b"\x1f\x8b"
        file: IO[bytes] = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if is_compressed else raw
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
                raise UsageError(f"{where}: longer than the limit of {MOST_LINE >> 20} MiB")
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield number, _object(line, where)


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        text = line.decode("utf-8").rstrip("\r\n")  # so that errors at the end have no line number
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: not UTF-8: {error.reason} at byte {error.start + 1}") from None
    try:
        return parse_json(text, dict[str, Any], where)
    except UsageError as error:
        is_object = text.lstrip().startswith("{")
        hint = "" if is_object else "; expected one JSON object per line (.jsonl), or .parquet"
        raise UsageError(f"{_JSON_LINE.sub('', str(error))}{hint}") from None


def _objects_of_parquet(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UsageError(f"{path}: requires pyarrow; `pip install 'fsdpctl[parquet]'`") from None
    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (ArrowException, OSError, ValueError) as error:
        reason = f"{' '.join(str(error).split()):.200}"
        raise UsageError(f"{path}, row {number + 1}: cannot be read: {reason}") from None


def is_held_out(content: bytes, fraction: float) -> bool:
    """Return whether a conversation is in the `fraction` that is held out for validation."""
    return xxhash.xxh3_64_intdigest(content, seed=_PART_SEED) < int(fraction * (1 << 64))


def repeat_hash(content: bytes) -> int:
    """Return the hash by which the conversations of a file are ranked for one more repetition."""
    return xxhash.xxh3_64_intdigest(content, seed=_REPEAT_SEED)


def repeats(
    files: Sequence[NDArray[np.uint64]], shares: Sequence[float]
) -> list[NDArray[np.int64]]:
    """Return how often an epoch repeats each conversation of each file.

    The epoch has as many conversations as without shares.

    Args:
        files: The `repeat_hash` of each conversation, per file.
        shares: Each file's fraction of an epoch's conversations; the sum is one.

    Raises:
        UsageError: If a file has no conversations, or a share of less than one.
    """
    total = sum(map(len, files))
    found = []
    for hashes, share in zip(files, shares, strict=True):
        wanted = round(share * total)
        if not len(hashes) or not wanted:
            raise UsageError(
                f"data.path: a share of {share:.3g} of {total} conversations, of a file with "
                f"{len(hashes)} to train on, rounds to 0 conversations"
            )
        times, more = divmod(wanted, len(hashes))
        counts = np.full(len(hashes), times, dtype=np.int64)
        counts[np.argsort(hashes, kind="stable")[:more]] += 1
        found.append(counts)
    return found
