"""Checkpoints in object stores (s3://, gs:// and others of fsspec), read by range.

Of a tensor, only the bytes that are used are fetched, and all of them are verified.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from weakref import finalize

from fsdpctl.checkpoint.folders import naming
from fsdpctl.checkpoint.manifest import FileInfo, Manifest, read_manifest
from fsdpctl.checkpoint.publish import check_space
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.tensor_file import (
    CHUNK_BYTES,
    HEADER_PREFIX,
    TensorEntry,
    TensorFile,
    header_bytes,
    open_tensor_file,
    sync,
)
from fsdpctl.errors import CheckpointError
from fsdpctl.io.activity import BYTES, doing
from fsdpctl.io.files import MOST_BYTES
from fsdpctl.io.run_files import MANIFEST
from fsdpctl.io.stores import StoredFile

_BLOCK, _LEAST_BLOCK = 8 << 20, 256 << 10  # bytes of a request
_HELD = 512 << 20  # bytes of blocks that a reader keeps
_AHEAD = 2  # blocks that are fetched before they are needed
TRANSFERS = ThreadPoolExecutor(8, thread_name_prefix="transfer")


class _Blocks:
    """Ranges of files in a store, each fetched once, and those that follow ahead of their use."""

    def __init__(self, num_files: int) -> None:
        """Keep blocks of `num_files` files, which may be read in turns."""
        self.size = max(_LEAST_BLOCK, min(_BLOCK, _HELD // (2 * (1 + _AHEAD) * max(1, num_files))))
        self._held: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()

    def read(self, file: StoredFile, number: int, file_size: int) -> bytes:
        last = (file_size - 1) // self.size
        for each in range(number, min(number + _AHEAD, last) + 1):
            place = (file.path, each)
            if place not in self._held:
                stop = min((each + 1) * self.size, file_size)
                self._held[place] = TRANSFERS.submit(file.read, each * self.size, stop)
            self._held.move_to_end(place)
        while len(self._held) > max(_HELD // self.size, 1 + _AHEAD):
            self._held.popitem(last=False)
        return self._held[file.path, number].result()


@dataclass(frozen=True, slots=True)
class _RemoteFile(TensorFile):
    """The header of a file in a store; `path` is that of its description."""

    place: StoredFile
    blocks: _Blocks

    def __str__(self) -> str:
        return self.place.url

    def chunks(self, entry: TensorEntry, start: int, stop: int) -> Iterator[memoryview]:
        first = self.data_start + entry.start
        for begin in range(start, stop, CHUNK_BYTES):
            end = min(begin + CHUNK_BYTES, stop)
            yield memoryview(bytearray().join(self._pieces(first + begin, first + end)))

    def _pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        size = self.blocks.size
        for number in range(start // size, (stop - 1) // size + 1):
            data = memoryview(self.blocks.read(self.place, number, self.size))
            yield data[max(0, start - number * size) : stop - number * size]


class RemoteReader(CheckpointReader):
    """A complete checkpoint in a store. Of its files, headers and sizes are in a directory here."""

    def __init__(self, place: StoredFile) -> None:
        """Fetch everything except the tensors' bytes, and check it."""
        self._place = place
        folder = Path(mkdtemp(prefix="fsdpctl-checkpoint-"))
        finalize(self, rmtree, folder, ignore_errors=True)
        with naming(folder, place.url):
            manifest = fetch_manifest(place, folder)
            self._blocks = _Blocks(len(manifest.files))
            files = [*manifest.files.items(), *manifest.attachments.items()]
            with doing(f"looking at {place.url}", "files", len(files)) as advance:
                for _ in TRANSFERS.map(partial(self._describe, folder), files):
                    advance(1)
            super().__init__(folder)

    def __str__(self) -> str:
        return self._place.url

    def attachment(self, name: str) -> bytes:
        with naming(self.folder, str(self)):
            return super().attachment(name)

    def _describe(self, folder: Path, about: tuple[str, FileInfo]) -> None:
        name, info = about
        file, path = self._place.inside(name), folder / name
        if file.size() != info.size:
            raise CheckpointError(f"{path}: truncated or corrupted: does not match {MANIFEST}")
        is_tensors = path.suffix == ".safetensors"
        end = info.size
        if is_tensors:
            end = header_bytes(file.read(0, min(HEADER_PREFIX, info.size)))
            if end > info.size:
                raise CheckpointError(f"{path}: truncated or corrupted: incomplete header")
        file.copy_start(path, end, info.size)

    def _file(self, path: Path) -> TensorFile:
        known = open_tensor_file(path)
        values = {each.name: getattr(known, each.name) for each in fields(known)}
        return _RemoteFile(**values, place=self._place.inside(path.name), blocks=self._blocks)

    def copy_files(self, folder: Path) -> None:
        files = {**self.manifest.files, **self.manifest.attachments}
        check_space(folder, sum(each.size for each in files.values()))
        for name, info in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            with (folder / name).open("xb") as out:
                out.truncate(info.size)
        sizes = {name: each.size for name, each in files.items()}
        with doing(f"downloading {self}", BYTES, sum(sizes.values())) as advance:
            for count in TRANSFERS.map(partial(self._copy, folder), ranges_of(sizes)):
                advance(count)
        (folder / MANIFEST).write_bytes((self.folder / MANIFEST).read_bytes())
        for name in (*files, MANIFEST):
            sync(folder / name)

    def _copy(self, folder: Path, part: tuple[str, int, int]) -> int:
        name, start, stop = part
        content = self._place.inside(name).read(start, stop)
        with (folder / name).open("r+b", buffering=0) as out:
            os.pwrite(out.fileno(), content, start)
        return len(content)


def fetch_manifest(place: StoredFile, folder: Path) -> Manifest:
    """Fetch the manifest of the checkpoint at `place` into a directory, and read it."""
    file = place.inside(MANIFEST)
    size = file.size()
    if size > MOST_BYTES:
        raise CheckpointError(f"{file.url}: larger than the limit of {MOST_BYTES >> 20:,} MiB")
    (folder / MANIFEST).write_bytes(file.read(0, size))
    with naming(folder, place.url):
        return read_manifest(folder)


def ranges_of(sizes: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    for name, size in sizes.items():
        for start in range(0, size, _BLOCK):
            yield name, start, min(start + _BLOCK, size)
