"""Safetensors files, written as a stream and read by range, without torch.

The format: eight bytes of header length, a JSON header, the concatenated bytes of the tensors.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import RawIOBase
from math import prod
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError, safe_open

from fsdpctl.errors import CheckpointError
from fsdpctl.io.files import open_regular, refusing
from fsdpctl.io.untrusted import parse_json

ITEMSIZES = {
    "F64": 8, "F32": 4, "BF16": 2, "F16": 2,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
HEADER_PREFIX = 8  # bytes, which have the length of the rest
CHUNK_BYTES = 1 << 20  # read and verified at a time; a multiple of every item's size
_BEGIN_BYTES = 32 << 20
# Larger writes use larger pages, which a virtual machine may have to request from its host.
_WRITE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file, and the offset of its bytes after the header."""

    name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEMSIZES[self.dtype]


def make_header(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file with `entries` in this order."""
    content: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for entry in entries:
        content[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [end, end + entry.nbytes],
        }
        end += entry.nbytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start on a multiple of 8
    return struct.pack("<Q", len(text)) + text


def write_tensor_file(path: Path, header: bytes, chunks: Iterable[memoryview]) -> int:
    """Write a new file and flush it to the disk; return its size in bytes."""
    with new_file(path) as file:
        file.write(memoryview(header))
        for chunk in chunks:
            file.write(chunk)
    check_by_reference(path)
    return file.size


def check_by_reference(path: Path) -> None:
    """Refuse a file that the reference implementation rejects, as for overlaps and gaps."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: truncated or corrupted: {error}") from None


@contextmanager
def new_file(path: Path) -> Iterator["NewFile"]:
    """Create a file and flush it to the disk at the end; FileExistsError if it exists."""
    with path.open("xb", buffering=0) as raw:
        yield NewFile(raw)
        os.fsync(raw.fileno())


def write_synced(path: Path, content: bytes) -> None:
    """Write a small new file and flush it to the disk."""
    with new_file(path) as file:
        file.write(memoryview(content))


class NewFile:
    """A new file that is written as a stream.

    Note: why it advises the kernel. The advice starts the disk's work on the bytes so far while the
    next chunks are computed, so that the final flush is short: half the time for gigabytes.
    """

    def __init__(self, file: RawIOBase) -> None:
        self._file = file
        self._begun = 0  # bytes whose write to the disk has begun
        self.size = 0

    def write(self, data: memoryview) -> None:
        self.size += len(data)
        while data:
            data = data[os.write(self._file.fileno(), data[:_WRITE_BYTES]) :]
        if self.size - self._begun >= _BEGIN_BYTES and hasattr(os, "posix_fadvise"):
            length = self.size - self._begun
            os.posix_fadvise(self._file.fileno(), self._begun, length, os.POSIX_FADV_DONTNEED)
            self._begun = self.size


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The header of an existing file."""

    path: Path
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    header_checksum: str
    data_start: int
    size: int

    def __str__(self) -> str:
        return str(self.path)

    def chunks(self, entry: TensorEntry, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes `[start, stop)` of a tensor; a chunk reuses the memory of the last."""
        buffer = memoryview(bytearray(min(CHUNK_BYTES, max(stop - start, 0))))
        descriptor = open_regular(self.path, CheckpointError)
        with refusing(self.path, CheckpointError), open(descriptor, "rb", buffering=0) as file:
            file.seek(self.data_start + entry.start + start)
            while start < stop:
                chunk = buffer[: min(CHUNK_BYTES, stop - start)]
                self._fill(file.fileno(), chunk)
                yield chunk
                start += len(chunk)

    def _fill(self, descriptor: int, buffer: memoryview) -> None:
        while buffer:
            count = os.readv(descriptor, [buffer])
            if not count:
                raise CheckpointError(f"{self.path}: truncated while it was read")
            buffer = buffer[count:]


def header_bytes(prefix: bytes) -> int:
    """Return the size of a header that begins with `prefix`, an endless one if that is cut."""
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == HEADER_PREFIX else 1 << 62
    return HEADER_PREFIX + int(length)


def open_tensor_file(path: Path) -> TensorFile:
    """Read the header of a file and check the file's length."""
    descriptor = open_regular(path, CheckpointError)
    with refusing(path, CheckpointError), open(descriptor, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(HEADER_PREFIX)
        length = header_bytes(prefix) - HEADER_PREFIX
        text = file.read(length) if length <= size else b""
    if len(prefix) < HEADER_PREFIX or len(text) != length:
        raise CheckpointError(f"{path}: truncated or corrupted: incomplete header")
    check_by_reference(path)
    header = parse_json(text, dict[str, dict[str, Any]], f"{path}: corrupted", CheckpointError)
    metadata = header.pop("__metadata__", {})
    entries = {}
    for name, each in header.items():
        if each["dtype"] not in ITEMSIZES:
            raise CheckpointError(f"{path}: {name}: dtype {each['dtype']} not supported")
        entries[name] = TensorEntry(
            name, each["dtype"], tuple(each["shape"]), each["data_offsets"][0]
        )
    checksum = xxhash.xxh3_128_hexdigest(prefix + text)
    return TensorFile(path, entries, metadata, checksum, HEADER_PREFIX + length, size)
