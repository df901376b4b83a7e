"""Checksums of an exported directory, in a file next to the weights that other tools ignore."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from fsdpctl.checkpoint.manifest import FileInfo, checksum
from fsdpctl.checkpoint.tensor_file import (
    CHUNK_BYTES,
    TensorEntry,
    make_header,
    write_synced,
    write_tensor_file,
)
from fsdpctl.errors import CheckpointError
from fsdpctl.io.checksummed_json import CHECKSUMS_FORMAT, checksummed, read_checksummed
from fsdpctl.io.files import checked_name, open_regular, os_errors_as
from fsdpctl.io.run_files import CHECKSUMS
from fsdpctl.io.untrusted import as_type

# Files that users add to a published directory, and that no tool reads as part of the model.
_MAY_BE_ADDED = re.compile(r"\..*|(README|LICENSE|NOTICE).*|.*\.md", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _ChecksumFile:
    files: dict[str, FileInfo]  # all files, each with the checksum of all bytes


class ChecksumWriter:
    """The checksums of an export, computed while its files are written."""

    def __init__(self) -> None:
        self._content = _ChecksumFile({})

    def write_tensors(
        self,
        path: Path,
        entries: Sequence[TensorEntry],
        metadata: dict[str, str],
        read: Callable[[TensorEntry], Iterator[memoryview]],
    ) -> None:
        """Write a file of tensors and record its checksum; `read` yields the bytes of a tensor."""
        header = make_header(entries, metadata)
        digest = xxhash.xxh3_128(header)

        def chunks() -> Iterator[memoryview]:
            for entry in entries:
                for data in read(entry):
                    digest.update(data)
                    yield data

        size = write_tensor_file(path, header, chunks())
        self._content.files[path.name] = FileInfo(size, digest.hexdigest())

    def write(self, folder: Path) -> None:
        """Add the other files in `folder`, and write the checksum file."""
        for name, path in _files_in(folder):
            if name not in self._content.files:
                data = path.read_bytes()
                self._content.files[name] = FileInfo(len(data), checksum(data))
        content = checksummed(asdict(self._content), CHECKSUMS_FORMAT)
        write_synced(folder / CHECKSUMS, content.encode())


class ExportedDirectory:
    """An exported directory whose files have the names and sizes in its checksum file."""

    def __init__(self, folder: Path) -> None:
        """Read the checksum file, and check everything except the bytes of files."""
        self.folder = folder
        location = f"{folder / CHECKSUMS}: corrupted"
        content = read_checksummed(folder, CHECKSUMS_FORMAT)
        self._content = as_type(content, _ChecksumFile, location, CheckpointError)
        for name in self._content.files:
            for part in name.split("/"):
                checked_name(part, ".*", location, CheckpointError)
        paths = dict(_files_in(folder))
        for name, info in self._content.files.items():
            if name not in paths:
                raise CheckpointError(f"{folder / name}: not found; {CHECKSUMS} names it")
            if (size := paths[name].stat().st_size) != info.size:
                problem = f"corrupted: expected {info.size:,} bytes, got {size:,}"
                raise CheckpointError(f"{folder / name}: {problem}")
        for name, path in paths.items():
            is_listed = name in self._content.files or name == CHECKSUMS
            if not is_listed and not _MAY_BE_ADDED.fullmatch(name.partition("/")[0]):
                raise CheckpointError(f"{path}: does not belong to this export")

    def counts(self) -> dict[str, int]:
        """Return the number of files, without the checksum file, and their bytes."""
        files = self._content.files
        return {"files": len(files), "bytes": sum(each.size for each in files.values())}

    def verify(self) -> Iterator[int]:
        """Verify every byte; yield the numbers of bytes read. CheckpointError names the file."""
        for name, info in self._content.files.items():
            path, digest = self.folder / name, xxhash.xxh3_128()
            descriptor = open_regular(path, CheckpointError)
            with os_errors_as(path, CheckpointError), open(descriptor, "rb", buffering=0) as file:
                while data := file.read(CHUNK_BYTES):
                    digest.update(data)
                    yield len(data)
            if digest.hexdigest() != info.xxh3:
                raise CheckpointError(f"{path}: corrupted: the checksum does not match")


def _files_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files below a directory, by their names relative to it."""
    for folder_path, _, names in os.walk(folder):
        for each in sorted(names):
            path = Path(folder_path, each)
            yield str(path.relative_to(folder)), path
