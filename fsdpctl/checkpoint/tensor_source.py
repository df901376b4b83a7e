"""Sources of weights, which are read by name and range, in any form of storage."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fsdpctl.checkpoint.manifest import BUFFER, PARAMETER, TensorInfo, parameter_name, tensor_key
from fsdpctl.checkpoint.tensor_file import FLOATS, ITEMSIZES, TensorEntry, TensorFile, cast
from fsdpctl.errors import CheckpointError
from fsdpctl.plan.layout import Span


class TensorSource(Protocol):
    """A source of full tensors by key, read by range."""

    def names(self, kind: str) -> list[str]:
        """Return the sorted names of the tensors of one kind."""

    def info(self, key: str) -> TensorInfo:
        """Return the shape and dtype of a full tensor."""

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        """Yield the elements `span`, or all, in chunks; the next chunk may reuse the memory."""

    def __str__(self) -> str:
        """Return the path or URL, which begins messages."""


class FileTensors:
    """Weights that are stored in full in safetensors files, without checksums."""

    def __init__(self, folder: Path, entries: Mapping[str, tuple[TensorFile, TensorEntry]]) -> None:
        self.folder = folder
        self._entries = dict(entries)

    def __str__(self) -> str:
        return str(self.folder)

    def names(self, kind: str) -> list[str]:
        return sorted(self._entries) if kind == PARAMETER else []

    def info(self, key: str) -> TensorInfo:
        file, entry = self._file_and_entry(key)
        if entry.dtype not in (*FLOATS, "I64"):  # I64: buffers
            raise CheckpointError(
                f"{file.path}: {entry.name} is {entry.dtype}; quantized weights are not supported"
            )
        return TensorInfo(list(entry.shape), entry.dtype)

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        file, entry = self._file_and_entry(key)
        size = ITEMSIZES[entry.dtype]
        span = span or Span(0, entry.nbytes // size)
        start = span.start
        for data in file.chunks(entry, span.start * size, span.stop * size):
            yield Span(start, start + len(data) // size), data
            start += len(data) // size

    def _file_and_entry(self, key: str) -> tuple[TensorFile, TensorEntry]:
        name = parameter_name(key)
        if name not in self._entries:
            raise CheckpointError(f"{self.folder}: {name} not found in these weights")
        return self._entries[name]


class Overlay:
    """The tensors of `upper`, and the tensors of `lower` that `upper` does not have."""

    def __init__(self, upper: TensorSource, lower: TensorSource) -> None:
        self.upper, self.lower = upper, lower
        self._in_upper = frozenset(tensor_keys(upper))

    def __str__(self) -> str:
        return str(self.upper)

    def names(self, kind: str) -> list[str]:
        return sorted({*self.upper.names(kind), *self.lower.names(kind)})

    def info(self, key: str) -> TensorInfo:
        return self._source(key).info(key)

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        return self._source(key).read(key, span)

    def _source(self, key: str) -> TensorSource:
        return self.upper if key in self._in_upper else self.lower


def read_bytes(source: TensorSource, key: str, span: Span) -> bytearray:
    """Return the bytes of the elements `span` of a tensor."""
    content = bytearray()
    for _, data in source.read(key, span):
        content += data  # a copy
    return content


def read_floats(source: TensorSource, key: str, span: Span | None = None) -> NDArray[np.float32]:
    """Return the elements `span` of a tensor, or all, in float32."""
    dtype = source.info(key).dtype
    parts = (cast(data, dtype, "F32", key) for _, data in source.read(key, span))
    return np.concatenate([np.frombuffer(data, np.float32).copy() for data in parts])


def expert_factors(
    source: TensorSource, lora_a: str, lora_b: str, num_experts: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return A as (experts, rank, in) and B as (experts, out, rank)."""
    keys = [tensor_key(PARAMETER, name) for name in (lora_a, lora_b)]
    a, b = (read_floats(source, key).reshape(source.info(key).shape) for key in keys)
    # PEFT stores A's rows expert by expert, but B's columns rank by rank.
    b = b.reshape(len(b), -1, num_experts).transpose(2, 0, 1)
    return a.reshape(num_experts, -1, a.shape[1]), b


def weight_bytes(source: TensorSource) -> int:
    return sum(source.info(key).nbytes for key in tensor_keys(source))


def tensor_keys(source: TensorSource) -> Iterator[str]:
    for kind in (PARAMETER, BUFFER):
        yield from (tensor_key(kind, name) for name in source.names(kind))
