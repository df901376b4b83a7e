"""Safetensors files, written as a stream and read by range, and casts of their values.

The format: eight bytes with the header's length, a JSON header, the concatenated bytes of tensors.

Note: why this file does not import torch. The import takes seconds and more memory than an export.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.io.files import open_regular, os_errors_as
from fsdpctl.io.untrusted import parse_json

# torch's names of dtypes and the bytes of an element, by safetensors' names of dtypes.
TENSOR_DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1),
    "U8": ("uint8", 1), "BOOL": ("bool", 1), "C64": ("complex64", 8),
}  # fmt: skip
ITEMSIZES = {name: size for name, (_, size) in TENSOR_DTYPES.items()}
FLOATS = ("F64", "F32", "BF16", "F16")
EXPORT_DTYPES = {TENSOR_DTYPES[each][0]: each for each in ("F32", "BF16", "F16")}
PREFIX_BYTES = 8  # they store the length of the JSON text
CHUNK_BYTES = 1 << 20  # read and verified at a time; a multiple of every item's size
_WRITEBACK_BYTES = 32 << 20
# Larger writes are slower on virtual machines: they fill larger pages, which the host must supply.
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
    """Return the header of a file with tensors in the order of `entries`."""
    content: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for entry in entries:
        properties = {"dtype": entry.dtype, "shape": list(entry.shape)}
        content[entry.name] = properties | {"data_offsets": [end, end + entry.nbytes]}
        end += entry.nbytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start on a multiple of 8
    return struct.pack("<Q", len(text)) + text


def write_new(path: Path, chunks: Iterable[memoryview]) -> int:
    """Write a new file and flush it to the disk; return its size. FileExistsError if it exists.

    Note: why posix_fadvise is called. It makes the kernel start to write earlier chunks to the disk
    while later chunks are computed. The shorter final fsync halves the time of a write of GBs.
    """
    size = flushed = 0  # bytes written, and bytes whose write to the disk has begun
    with path.open("xb", buffering=0) as file:
        for data in chunks:
            size += len(data)
            while data:
                data = data[os.write(file.fileno(), data[:_WRITE_BYTES]) :]
            if size - flushed >= _WRITEBACK_BYTES and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), flushed, size - flushed, os.POSIX_FADV_DONTNEED)
                flushed = size
        os.fsync(file.fileno())
    return size


def write_synced(path: Path, content: bytes) -> None:
    write_new(path, [memoryview(content)])


def write_tensor_file(path: Path, header: bytes, chunks: Iterable[memoryview]) -> int:
    size = write_new(path, chain([memoryview(header)], chunks))
    check_with_safetensors(path)
    return size


def check_with_safetensors(path: Path) -> None:
    """Check a file with the safetensors library, which rejects overlaps and gaps, for example."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: truncated or corrupted: {error}") from None


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def fsync(path: Path) -> None:
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
        """Yield bytes `[start, stop)` of a tensor; the next chunk reuses the memory of a chunk."""
        buffer = memoryview(bytearray(min(CHUNK_BYTES, max(stop - start, 0))))
        descriptor = open_regular(self.path, CheckpointError)
        with os_errors_as(self.path, CheckpointError), open(descriptor, "rb") as file:
            file.seek(self.data_start + entry.start + start)
            while start < stop:
                chunk = buffer[: min(CHUNK_BYTES, stop - start)]
                if file.readinto(chunk) < len(chunk):
                    raise CheckpointError(f"{self.path}: truncated while it was read")
                yield chunk
                start += len(chunk)


def header_size(prefix: bytes) -> int:
    """Return the size of a header that begins with `prefix`; huge if `prefix` is truncated."""
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == PREFIX_BYTES else 1 << 62
    return PREFIX_BYTES + int(length)


def open_tensor_file(path: Path) -> TensorFile:
    """Read the header of a file and check the file's length."""
    descriptor = open_regular(path, CheckpointError)
    with os_errors_as(path, CheckpointError), open(descriptor, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(PREFIX_BYTES)
        length = header_size(prefix) - PREFIX_BYTES
        text = file.read(length) if length <= size else b""
    if len(prefix) < PREFIX_BYTES or len(text) != length:
        raise CheckpointError(f"{path}: truncated or corrupted: incomplete header")
    check_with_safetensors(path)
    header = parse_json(text, dict[str, dict[str, Any]], f"{path}: corrupted", CheckpointError)
    metadata = header.pop("__metadata__", {})
    entries = {}
    for name, each in header.items():
        if each["dtype"] not in ITEMSIZES:
            raise CheckpointError(f"{path}: {name}: dtype {each['dtype']} not supported")
        properties = each["dtype"], tuple(each["shape"]), each["data_offsets"][0]
        entries[name] = TensorEntry(name, *properties)
    checksum = xxhash.xxh3_128_hexdigest(prefix + text)
    return TensorFile(path, entries, metadata, checksum, PREFIX_BYTES + length, size)


def cast(data: memoryview, source: str, target: str, name: str) -> memoryview:
    """Cast `data` between dtypes; UsageError if a finite value is out of the range of float16."""
    if source == target:
        return data
    values: Any = np.frombuffer(data, np.uint16 if source == "BF16" else TENSOR_DTYPES[source][0])
    if source == "BF16":  # the upper half of float32
        values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        result = values.astype(np.float32)  # as torch, which rounds float64 to float32 first
        if target == "BF16":
            return _to_bfloat16(result).view(np.uint8).data
        result = result.astype(TENSOR_DTYPES[target][0])
    if target == "F16" and bool(np.any(np.isinf(result) & np.isfinite(values))):
        raise UsageError(f"{name}: values out of the range of float16; export them as bfloat16")
    content: NDArray[np.uint8] = result.view(np.uint8)
    return content.data


def join_remainder(upper: memoryview, lower: memoryview) -> memoryview:
    """Join bfloat16 values and signed 8-bit remainders to float32; see `quantized_states`."""
    bits = np.frombuffer(upper, np.int16).astype(np.int32) << 8
    result: NDArray[np.uint8] = ((bits + np.frombuffer(lower, np.int8)) << 8).view(np.uint8)
    return result.data


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    upper = bits >> np.uint32(16)
    # Round to nearest, ties to even.
    rounded = (bits + (np.uint32(0x7FFF) + (upper & np.uint32(1)))) >> np.uint32(16)
    result: NDArray[np.uint16] = rounded.astype(np.uint16)
    is_nan = np.isnan(values)
    if is_nan.any():  # rounding could carry a NaN over into infinity
        result[is_nan] = 0x7FC0
    return result
