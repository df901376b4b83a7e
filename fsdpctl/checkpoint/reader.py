"""Reads a checkpoint by ranges of whole tensors, and believes nothing it has not checked."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from fsdpctl.checkpoint.manifest import MANIFEST, Manifest, TensorInfo, read_manifest
from fsdpctl.checkpoint.spans import SPANS, StoredSpan, spans_from_json
from fsdpctl.checkpoint.tensor_file import (
    DTYPES,
    TensorEntry,
    TensorFile,
    open_tensor_file,
    tensor_bytes,
)
from fsdpctl.errors import CheckpointError
from fsdpctl.plan.layout import Span


@dataclass(frozen=True, slots=True)
class _Part:
    """A stored span and where it lies."""

    stored: StoredSpan
    file: TensorFile
    entry: TensorEntry


class CheckpointReader:
    """A complete checkpoint: every file is there, of its size, and covers every tensor."""

    def __init__(self, folder: Path) -> None:
        """Open `folder` and check everything but the tensors' bytes.

        Raises:
            CheckpointError: a file is missing, cut short, changed or of another checkpoint.
        """
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self._parts: dict[str, list[_Part]] = {key: [] for key in self.manifest.tensors}
        self._verified: set[tuple[str, str]] = set()
        self._check_names()
        for name in self.manifest.files:
            self._open(name)
        for key, info in self.manifest.tensors.items():
            self._check_cover(key, info)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(info.size for info in self.manifest.files.values())

    def names(self, kind: str) -> list[str]:
        """Names of the tensors of one kind, sorted."""
        prefix = f"{kind}/"
        return sorted(key.removeprefix(prefix) for key in self._parts if key.startswith(prefix))

    def info(self, key: str) -> TensorInfo:
        """Shape and dtype of a whole tensor.

        Raises:
            CheckpointError: the checkpoint does not have it.
        """
        if key not in self.manifest.tensors:
            raise CheckpointError(f"{self.folder}: there is no {key} in this checkpoint")
        return self.manifest.tensors[key]

    def read_parts(self, key: str) -> Iterator[tuple[Span, Tensor]]:
        """The stored spans of a tensor in order, each verified when it is reached."""
        self.info(key)
        for part in self._parts[key]:
            yield part.stored.span, self._read(key, part)

    def read_into(self, key: str, span: Span, target: Tensor) -> None:
        """Copy the elements `span` of a flattened tensor into `target`, cast to its dtype.

        Raises:
            CheckpointError: a checksum does not match, or the tensor is too short.
        """
        if span.stop > self.info(key).numel:
            raise CheckpointError(
                f"{self.folder}: {key} has {self.info(key).numel} elements, {span.stop} wanted"
            )
        for part in self._parts[key]:
            both = part.stored.span.intersect(span)
            if both is not None:
                values = self._read(key, part)
                start = both.start - part.stored.span.start
                target[both.start - span.start : both.stop - span.start].copy_(
                    values[start : start + both.numel]
                )

    def verify(self) -> Iterator[int]:
        """Check every byte; yields the bytes done after each tensor.

        Raises:
            CheckpointError: a checksum does not match.
        """
        done = 0
        for key, parts in self._parts.items():
            for part in parts:
                self._read(key, part)
                done += part.entry.nbytes
            yield done

    def _read(self, key: str, part: _Part) -> Tensor:
        values = part.file.read(part.entry)
        where = (part.file.path.name, key)
        if where not in self._verified:
            if xxhash.xxh3_128_hexdigest(tensor_bytes(values)) != part.stored.xxh3:
                raise CheckpointError(
                    f"{part.file.path}: damaged: the checksum of {key} does not match"
                )
            self._verified.add(where)
        return values

    def _check_names(self) -> None:
        expected = {*self.manifest.files, MANIFEST}
        for file in sorted(self.folder.iterdir()):
            if file.name not in expected:
                raise CheckpointError(f"{file}: does not belong to this checkpoint")

    def _open(self, name: str) -> None:
        info, path = self.manifest.files[name], self.folder / name
        file = open_tensor_file(path)
        if file.size != info.size or file.header_checksum != info.header_xxh3:
            raise CheckpointError(f"{path}: not the file that {MANIFEST} describes")
        try:
            stored = spans_from_json(file.metadata[SPANS])
        except (ValueError, TypeError, KeyError):
            raise CheckpointError(f"{path}: damaged: it does not say what it holds") from None
        if stored.keys() != file.entries.keys():
            raise CheckpointError(f"{path}: damaged: it does not say what it holds")
        for key, each in stored.items():
            self._add(key, _Part(each, file, file.entries[key]))

    def _add(self, key: str, part: _Part) -> None:
        info = self.info(key)
        same = part.entry.dtype == DTYPES.get(info.dtype)
        if not same or part.entry.shape != (part.stored.span.numel,):
            raise CheckpointError(f"{part.file.path}: {key} is not what {MANIFEST} describes")
        self._parts[key].append(part)

    def _check_cover(self, key: str, info: TensorInfo) -> None:
        parts = self._parts[key]
        parts.sort(key=lambda part: part.stored.span)
        starts = [part.stored.span.start for part in parts]
        stops = [part.stored.span.stop for part in parts]
        if [*starts, info.numel] != [0, *stops]:
            raise CheckpointError(
                f"{self.folder}: the files do not hold each of the {info.numel} elements of {key} "
                "exactly once"
            )


def empty_like(info: TensorInfo) -> Tensor:
    """A whole tensor to read into."""
    return torch.empty(info.shape, dtype=DTYPES[info.dtype])
