"""A reader of checkpoints by ranges of full tensors, which verifies every byte that it returns."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fsdpctl.checkpoint import manifest, tensor_file
from fsdpctl.data.tokenizer_files import TEMPLATES
from fsdpctl.errors import CheckpointError
from fsdpctl.io.files import open_regular, read_regular
from fsdpctl.io.run_files import MANIFEST
from fsdpctl.plan.layout import Span, round_up


@dataclass(frozen=True, slots=True)
class LocatedSpan:
    """A stored span of a tensor, and its location in a file."""

    stored: manifest.StoredSpan
    file: tensor_file.TensorFile
    entry: tensor_file.TensorEntry


class CheckpointReader:
    """A complete checkpoint: all files have their sizes, and their spans cover every tensor."""

    def __init__(self, folder: Path) -> None:
        """Open `folder` and check everything except the bytes of tensors."""
        self.folder = folder
        self.manifest: manifest.Manifest = manifest.read_manifest(folder)
        self._parts: dict[str, list[LocatedSpan]] = {key: [] for key in self.manifest.tensors}
        self._check_names()
        for name in self.manifest.files:
            self._open(name)
        for key, info in self.manifest.tensors.items():
            self._check_cover(key, info)

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def num_bytes(self) -> int:
        return sum(info.size for info in self.manifest.files.values())

    def names(self, kind: str) -> list[str]:
        prefix = f"{kind}/"
        return sorted(key.removeprefix(prefix) for key in self._parts if key.startswith(prefix))

    def info(self, key: str) -> manifest.TensorInfo:
        """Return the shape and dtype of what `read` yields; with a remainder, it is float32."""
        stored, remainder = self._stored_info(key), self._remainder_of(key)
        return stored if remainder is None else manifest.TensorInfo(stored.shape, "F32")

    def _stored_info(self, key: str) -> manifest.TensorInfo:
        if key not in self.manifest.tensors:
            raise CheckpointError(f"{self.folder}: {key} not found in this checkpoint")
        return self.manifest.tensors[key]

    def parts(self, key: str) -> list[LocatedSpan]:
        self._stored_info(key)  # raises if the key is unknown
        return list(self._parts[key])

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        """Yield the elements `span` of a flattened tensor, in order, as bytes; None reads all.

        Weights that are stored as upper and lower bits are joined to float32, which is exact. Only
        chunks with requested elements are read, and each is verified before it is yielded. Copy a
        chunk before you advance: the next chunk may reuse its memory.
        """
        numel = self._stored_info(key).numel
        span = span or Span(0, numel)
        if span.stop > numel:
            problem = f"expected {span.stop} elements, got {numel}"
            raise CheckpointError(f"{self.folder}: {key}: {problem}")
        remainder = self._remainder_of(key)
        for chunk_span, data in self._read_stored(key, span):
            if remainder is None:
                yield chunk_span, data
                continue
            for lower_span, lower in self._read_stored(remainder, chunk_span):
                local_span = lower_span.shift(-chunk_span.start)
                upper = data[2 * local_span.start : 2 * local_span.stop]
                yield lower_span, tensor_file.join_remainder(upper, lower)

    def _read_stored(self, key: str, span: Span) -> Iterator[tuple[Span, memoryview]]:
        for part in self._parts[key]:
            overlap = part.stored.span.intersect(span)
            if overlap is not None:
                yield from _read_part(key, part, overlap)

    def _remainder_of(self, key: str) -> str | None:
        """Return the key of the lower bits of a weight, or None if the weight has one part."""
        kind, _, name = key.partition("/")
        lower = manifest.tensor_key(manifest.REMAINDER, name)
        return lower if kind == manifest.PARAMETER and lower in self.manifest.tensors else None

    def attachment(self, name: str) -> bytes:
        """Return an attached file that comes with the model, such as tokenizer.json."""
        info, path = self.manifest.attachments[name], self.folder / name
        content = read_regular(path, CheckpointError)
        if len(content) != info.size or manifest.checksum(content) != info.xxh3:
            raise CheckpointError(f"{path}: corrupted: does not match {MANIFEST}")
        return content

    def verify(self) -> Iterator[int]:
        """Verify every byte; yield the number of bytes verified since the last yield."""
        for name in self.manifest.attachments:
            self.attachment(name)
        for key, info in self.manifest.tensors.items():
            for _, data in self._read_stored(key, Span(0, info.numel)):
                yield len(data)

    def copy_files(self, folder: Path) -> None:
        for name in (*self.manifest.files, *self.manifest.attachments, MANIFEST):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(self.folder / name, folder / name)
            tensor_file.fsync(folder / name)

    def _check_names(self) -> None:
        expected = {*self.manifest.files, *self.manifest.attachments, MANIFEST}
        templates = self.folder / TEMPLATES
        if templates.is_symlink():
            raise CheckpointError(f"{templates}: expected a directory, got a link")
        inner = templates.iterdir() if templates.is_dir() else ()
        for file in sorted([*self.folder.iterdir(), *inner]):
            if str(file.relative_to(self.folder)) not in expected and file != templates:
                raise CheckpointError(f"{file}: does not belong to this checkpoint")
        for name, info in self.manifest.attachments.items():
            path = self.folder / name
            if not path.exists():
                raise CheckpointError(f"{path}: not found")
            with open(open_regular(path, CheckpointError), "rb") as opened:
                size = os.fstat(opened.fileno()).st_size
            if size != info.size:
                raise CheckpointError(f"{path}: corrupted: does not match {MANIFEST}")

    def _open(self, name: str) -> None:
        info, path = self.manifest.files[name], self.folder / name
        file = self._file(path)
        if file.size != info.size or file.header_checksum != info.xxh3:
            raise CheckpointError(f"{path}: corrupted: does not match {MANIFEST}")
        spans = file.metadata.pop(manifest.SPANS_KEY, "{}")  # popped: the text is long
        stored = manifest.spans_from_json(spans, f"{path}: corrupted")
        if stored.keys() != file.entries.keys():
            raise CheckpointError(f"{path}: corrupted: the spans do not match the tensors")
        for key, each in stored.items():
            dtype, entry = self._stored_info(key).dtype, file.entries[key]
            num_chunks = -(-entry.nbytes // tensor_file.CHUNK_BYTES)
            expected = dtype, (each.span.numel,), each.num_chunks
            if (entry.dtype, entry.shape, num_chunks) != expected:
                raise CheckpointError(f"{file}: corrupted: {key} does not match {MANIFEST}")
            self._parts[key].append(LocatedSpan(each, file, entry))

    def _file(self, path: Path) -> tensor_file.TensorFile:  # RemoteReader overrides it
        return tensor_file.open_tensor_file(path)

    def _check_cover(self, key: str, info: manifest.TensorInfo) -> None:
        parts = self._parts[key]
        parts.sort(key=lambda part: part.stored.span)
        starts = [part.stored.span.start for part in parts]
        stops = [part.stored.span.stop for part in parts]
        if [*starts, info.numel] != [0, *stops]:  # each span starts where the previous one stops
            raise CheckpointError(
                f"{self.folder}: corrupted: the files do not store each of the {info.numel} "
                f"elements of {key} exactly once"
            )


def _read_part(key: str, part: LocatedSpan, span: Span) -> Iterator[tuple[Span, memoryview]]:
    size = tensor_file.ITEMSIZES[part.entry.dtype]
    per_chunk, offset = tensor_file.CHUNK_BYTES // size, part.stored.span.start
    local_span = span.shift(-offset)
    first = local_span.start // per_chunk
    stop = min(round_up(local_span.stop, per_chunk), part.stored.span.numel)
    chunks = part.file.chunks(part.entry, first * tensor_file.CHUNK_BYTES, stop * size)
    for index, data in enumerate(chunks, start=first):
        if not part.stored.matches_chunk(index, data):
            raise CheckpointError(f"{part.file}: corrupted: the checksum of {key} does not match")
        chunk_span = Span(index * per_chunk, index * per_chunk + len(data) // size)
        overlap = chunk_span.intersect(local_span)
        assert overlap is not None
        chunk_part = overlap.shift(-chunk_span.start)
        yield overlap.shift(offset), data[chunk_part.start * size : chunk_part.stop * size]
