"""Safetensors files, written as a stream and read by range.

The format: eight bytes of header length, a JSON header, the tensors' bytes one after another.
"""

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from fsdpctl.errors import CheckpointError

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_MAX_HEADER = 1 << 30


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file: what it is and where its bytes lie behind the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * self.dtype.itemsize


def tensor_bytes(values: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    flat = values.detach().contiguous().view(-1)
    array: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return array.data if flat.numel() else memoryview(b"")


def make_header(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file with `entries` in this order."""
    content: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for entry in entries:
        content[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [end, end + entry.nbytes],
        }
        end += entry.nbytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start on a multiple of 8
    return struct.pack("<Q", len(text)) + text


def write_tensor_file(path: Path, header: bytes, chunks: Iterable[memoryview]) -> int:
    """Write a new file and bring it to the disk; returns its size in bytes."""
    with path.open("xb") as file:
        file.write(header)
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def sync_folder(path: Path) -> None:
    """Bring a directory's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class TensorFile:
    """An existing file's header."""

    path: Path
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    header_checksum: str
    data_start: int
    size: int

    def read(self, entry: TensorEntry) -> Tensor:
        """The values of a tensor; the memory is the file's own, copied when written to."""
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        raw = np.memmap(
            self.path,
            dtype=np.uint8,
            mode="c",
            offset=self.data_start + entry.start,
            shape=(entry.nbytes,),
        )
        return torch.from_numpy(raw).view(entry.dtype).view(entry.shape)


def open_tensor_file(path: Path) -> TensorFile:
    """Read a file's header and check that the file is as long as it says.

    Raises:
        CheckpointError: the file is missing, cut short or not what it should be.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER + 1
            text = file.read(length) if length <= min(_MAX_HEADER, size) else b""
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    if len(prefix) < 8 or len(text) != length:
        raise CheckpointError(f"{path}: cut short or damaged: its header is incomplete")
    try:
        content = json.loads(text)
        metadata = content.pop("__metadata__", {})
        entries = {name: _entry(name, each) for name, each in content.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise CheckpointError(f"{path}: damaged: its header cannot be read") from None
    end = max((entry.start + entry.nbytes for entry in entries.values()), default=0)
    if size != 8 + length + end:
        raise CheckpointError(f"{path}: {size} bytes, where its header says {8 + length + end}")
    checksum = xxhash.xxh3_128_hexdigest(prefix + text)
    return TensorFile(path, entries, metadata, checksum, 8 + length, size)


def _entry(name: str, about: dict[str, Any]) -> TensorEntry:
    start, stop = about["data_offsets"]
    entry = TensorEntry(name, DTYPES[about["dtype"]], tuple(about["shape"]), start)
    if stop - start != entry.nbytes or start < 0:
        raise ValueError(name)
    return entry
