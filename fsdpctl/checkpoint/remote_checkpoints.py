"""Checkpoints in object stores (s3://, gs://): read by range, and uploaded.

A reader fetches only the bytes that are used, and verifies them. A run uploads one file after
another, reads each file back and compares it. The manifest is uploaded last: a checkpoint without a
manifest is incomplete and is not read.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory, mkdtemp
from weakref import finalize

from fsdpctl.checkpoint import tensor_file
from fsdpctl.checkpoint.manifest import FileInfo, Manifest, read_manifest
from fsdpctl.checkpoint.publish import check_space
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.run_checkpoints import (
    OLDER_HINT,
    best_checkpoint_name,
    expired,
    find_checkpoint,
    renamed_in_errors,
    step_of,
)
from fsdpctl.config.schema import Config
from fsdpctl.config.training import CheckpointConfig
from fsdpctl.errors import CheckpointError, FsdpctlError, UsageError
from fsdpctl.io.activity import BYTES, doing
from fsdpctl.io.files import MAX_READ_BYTES
from fsdpctl.io.run_files import MANIFEST, STEP
from fsdpctl.io.stores import StoredFile, is_remote, open_store, with_retries

REMOTE_KEY = "checkpoint.remote"
_BLOCK_BYTES, _MIN_BLOCK_BYTES = 8 << 20, 256 << 10  # bytes of a request
_CACHE_BYTES = 512 << 20  # memory for the blocks of a reader
_PREFETCHED_BLOCKS = 2  # blocks that are fetched before they are needed
_UPLOADS = 3  # uploads of a file, if it differs when it is read back
# Tasks must not wait for other tasks: all 8 threads would wait.
_TRANSFERS = ThreadPoolExecutor(8, thread_name_prefix="transfer")


class _BlockCache:
    """A cache of blocks of files in a store, which prefetches the blocks that follow a read."""

    def __init__(self, num_files: int) -> None:
        """Choose a block size for reads that alternate between `num_files` files."""
        self.block_bytes = max(
            _MIN_BLOCK_BYTES,
            min(_BLOCK_BYTES, _CACHE_BYTES // (2 * (1 + _PREFETCHED_BLOCKS) * max(1, num_files))),
        )
        self._blocks: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()

    def read(self, file: StoredFile, index: int, file_size: int) -> bytes:
        last = (file_size - 1) // self.block_bytes
        for each in range(index, min(index + _PREFETCHED_BLOCKS, last) + 1):
            block = (file.path, each)
            if block not in self._blocks:
                start = each * self.block_bytes
                stop = min(start + self.block_bytes, file_size)
                self._blocks[block] = _TRANSFERS.submit(file.read, start, stop)
            self._blocks.move_to_end(block)
        while len(self._blocks) > max(_CACHE_BYTES // self.block_bytes, 1 + _PREFETCHED_BLOCKS):
            self._blocks.popitem(last=False)
        return self._blocks[file.path, index].result()


@dataclass(frozen=True, slots=True)
class _RemoteFile(tensor_file.TensorFile):
    """The header of a file in a store; `path` is a local file that has only the header."""

    remote: StoredFile
    blocks: _BlockCache

    def __str__(self) -> str:
        return self.remote.url

    def chunks(self, entry: tensor_file.TensorEntry, start: int, stop: int) -> Iterator[memoryview]:
        first = self.data_start + entry.start
        for begin in range(start, stop, tensor_file.CHUNK_BYTES):
            end = min(begin + tensor_file.CHUNK_BYTES, stop)
            yield memoryview(bytearray().join(self._pieces(first + begin, first + end)))

    def _pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        size = self.blocks.block_bytes
        for index in range(start // size, (stop - 1) // size + 1):
            data = memoryview(self.blocks.read(self.remote, index, self.size))
            yield data[max(0, start - index * size) : stop - index * size]


class RemoteReader(CheckpointReader):
    """A complete checkpoint in a store. Local sparse files of the same sizes have the headers."""

    def __init__(self, remote: StoredFile) -> None:
        """Fetch and check everything except the bytes of tensors."""
        self._remote = remote
        folder = Path(mkdtemp(prefix="fsdpctl-checkpoint-"))
        finalize(self, rmtree, folder, ignore_errors=True)
        with renamed_in_errors(folder, remote.url):
            manifest = fetch_manifest(remote, folder)
            self._blocks = _BlockCache(len(manifest.files))
            files = [*manifest.files.items(), *manifest.attachments.items()]
            with doing(f"fetching headers of {remote.url}", "files", len(files)) as advance:
                for _ in _TRANSFERS.map(partial(self._fetch_header, folder), files):
                    advance(1)
            super().__init__(folder)

    def __str__(self) -> str:
        return self._remote.url

    def attachment(self, name: str) -> bytes:
        with renamed_in_errors(self.folder, str(self)):
            return super().attachment(name)

    def _fetch_header(self, folder: Path, file_and_info: tuple[str, FileInfo]) -> None:
        name, info = file_and_info
        file, path = self._remote.child(name), folder / name
        if file.size() != info.size:
            raise CheckpointError(f"{path}: truncated or corrupted: does not match {MANIFEST}")
        end = info.size
        if path.suffix == ".safetensors":
            end = tensor_file.header_size(file.read(0, min(tensor_file.PREFIX_BYTES, info.size)))
            if end > info.size:
                raise CheckpointError(f"{path}: truncated or corrupted: incomplete header")
        file.copy_prefix(path, end, info.size)

    def _file(self, path: Path) -> tensor_file.TensorFile:
        file = tensor_file.open_tensor_file(path)
        values = {each.name: getattr(file, each.name) for each in fields(file)}
        return _RemoteFile(**values, remote=self._remote.child(path.name), blocks=self._blocks)

    def copy_files(self, folder: Path) -> None:
        files = {**self.manifest.files, **self.manifest.attachments}
        total = sum(each.size for each in files.values())
        check_space(folder, total)
        for name, info in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            with (folder / name).open("xb") as file:
                file.truncate(info.size)
        parts = ((name, *x) for name, info in files.items() for x in _byte_ranges(info.size))
        with doing(f"downloading {self}", BYTES, total) as advance:
            for count in _TRANSFERS.map(partial(self._copy, folder), parts):
                advance(count)
        (folder / MANIFEST).write_bytes((self.folder / MANIFEST).read_bytes())
        for name in (*files, MANIFEST):
            tensor_file.fsync(folder / name)

    def _copy(self, folder: Path, part: tuple[str, int, int]) -> int:
        name, start, stop = part
        content = self._remote.child(name).read(start, stop)
        with (folder / name).open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), content, start)
        return len(content)


def fetch_manifest(remote: StoredFile, folder: Path) -> Manifest:
    """Fetch the manifest of a checkpoint into a directory, and read it."""
    file = remote.child(MANIFEST)
    size = file.size()
    if size > MAX_READ_BYTES:
        raise CheckpointError(f"{file.url}: larger than the limit of {MAX_READ_BYTES >> 20:,} MiB")
    (folder / MANIFEST).write_bytes(file.read(0, size))
    with renamed_in_errors(folder, remote.url):
        return read_manifest(folder)


def _byte_ranges(size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + _BLOCK_BYTES, size)) for start in range(0, size, _BLOCK_BYTES))


@dataclass(frozen=True, slots=True)
class RemoteCheckpoint:
    """A complete checkpoint in a store, of which only the manifest was read."""

    remote: StoredFile
    step: int
    manifest: Manifest

    @property
    def url(self) -> str:
        return self.remote.url

    def open(self) -> RemoteReader:
        return RemoteReader(self.remote)


class RemoteCheckpoints:
    """The checkpoints of a run in an object store, each in a directory for its step."""

    def __init__(self, url: str, location: str = "") -> None:
        """Open the store of a URL; messages about the URL begin with `location`."""
        self.url = url.rstrip("/")
        self._root = open_store(self.url, location or self.url, CheckpointError)
        if hasattr(self._root.store, "auto_mkdir"):  # file systems need directories
            self._root.store.auto_mkdir = True

    def _find(self) -> dict[Path, bool]:
        """Return the relative paths of checkpoints, oldest first, and whether each is complete."""
        store, root = self._root.store, self._root.path
        store.invalidate_cache()
        try:
            # Not fsspec's `find` or `exists`, which return nothing if the store fails.
            paths = with_retries(self.url, lambda: store.ls(root, detail=False), UsageError)
        except UsageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            paths = []
        names = {each.rstrip("/").rpartition("/")[2] for each in paths}
        steps = sorted((Path(each) for each in names if STEP.fullmatch(each)), key=step_of)
        manifests = (self._root.child(each.name).child(MANIFEST) for each in steps)
        return dict(zip(steps, _TRANSFERS.map(StoredFile.exists, manifests), strict=True))

    def complete(self) -> list[Path]:
        return [name for name, is_complete in self._find().items() if is_complete]

    def newest(self) -> "RemoteCheckpoint | None":
        """Return the newest complete checkpoint; a CheckpointError suggests an older one."""
        checkpoints = self.complete()
        if not checkpoints:
            return None
        remote = self._root.child(checkpoints[-1].name)
        try:
            with TemporaryDirectory() as folder:
                manifest = fetch_manifest(remote, Path(folder))
        except CheckpointError as error:
            hint = (
                OLDER_HINT.format(f"{self.url}/{checkpoints[-2].name}") if checkpoints[1:] else ""
            )
            raise CheckpointError(f"{error}{hint}") from None
        return RemoteCheckpoint(remote, step_of(checkpoints[-1]), manifest)

    def open(self, name: str) -> RemoteReader:
        """Open a checkpoint of the run; CheckpointError if it is incomplete or corrupted."""
        return RemoteReader(self._root.child(name))

    def of_run(self, run: str) -> "RemoteCheckpoints":
        """Return the checkpoints of another run in the same store."""
        return RemoteCheckpoints(f"{self.url.rpartition('/')[0]}/{run}")

    def check_writable(self) -> None:
        """Write a file and delete it; UsageError if the store does not allow it."""
        probe = self._root.child("write-check")
        with_retries(probe.url, lambda: probe.store.pipe_file(probe.path, b"fsdpctl"), UsageError)
        probe.remove()

    def upload(self, folder: Path) -> None:
        """Upload a complete checkpoint, unless the store has it."""
        remote = self._root.child(folder.name)
        local_manifest, remote_manifest = folder / MANIFEST, remote.child(MANIFEST)
        if remote_manifest.exists():
            if not _difference(local_manifest, remote_manifest):
                return
            remote_manifest.remove()  # a mix of two checkpoints must never have a manifest
        manifest = read_manifest(folder)
        for name in (*manifest.files, *manifest.attachments):
            _upload_file(folder / name, remote.child(name))
        try:
            _upload_file(local_manifest, remote_manifest)
        except FsdpctlError:
            remote_manifest.remove()
            raise

    def remove_expired(self, keep: CheckpointConfig, newest: Path) -> None:
        """Delete checkpoints that `keep` does not retain, and incomplete ones before `newest`."""
        kept_names = {newest.name, best_checkpoint_name(newest) if keep.keep_best else ""}
        checkpoints = self._find()
        complete = [each for each, is_complete in checkpoints.items() if is_complete]
        older = [each for each in checkpoints if step_of(each) < step_of(newest)]
        incomplete = [each for each in older if each not in complete]
        for each in (*expired(complete, keep, kept_names), *incomplete):
            remote = self._root.child(each.name)
            remote.child(MANIFEST).remove()  # first: an interrupted removal leaves no manifest
            remote.remove(recursive=True)


def remote_checkpoints_of(config: Config) -> RemoteCheckpoints | None:
    """Return the checkpoints of a run in its object store, if it has one."""
    url, run_dir = config.checkpoint.remote, config.train.run_dir
    if url is None or run_dir is None:
        return None
    name = Path(os.path.abspath(run_dir)).name  # "." has no name
    return RemoteCheckpoints(f"{url.rstrip('/')}/{name}", f"{REMOTE_KEY}={url}")


def open_checkpoint(source: str) -> CheckpointReader:
    """Open a checkpoint, or the newest checkpoint of a run, at a local path or a URL."""
    if not is_remote(source):
        return CheckpointReader(find_checkpoint(Path(source).expanduser()))
    parent, _, name = source.rstrip("/").rpartition("/")
    if STEP.fullmatch(name):
        return RemoteCheckpoints(parent).open(name)
    newest = RemoteCheckpoints(source).newest()
    if newest is None:
        raise UsageError(f"{source}: no complete checkpoint found; expected a run or a checkpoint")
    return newest.open()


def _upload_file(path: Path, file: StoredFile) -> None:
    """Upload a file, unless the store has it, and repeat until it reads back equal."""
    if file.exists() and not _difference(path, file):
        return
    for _ in range(_UPLOADS):
        with_retries(file.url, partial(file.store.put_file, str(path), file.path))
        difference = _difference(path, file)
        if not difference:
            return
    raise FsdpctlError(f"{difference} (uploaded and read back {_UPLOADS} times)")


def _difference(path: Path, file: StoredFile) -> str:
    """Return how stored and local file differ, or "". CheckpointError: the store failed."""
    size = path.stat().st_size

    def compare(byte_range: tuple[int, int]) -> bool:
        start, stop = byte_range
        with path.open("rb", buffering=0) as local_file:
            return os.pread(local_file.fileno(), stop - start, start) == file.read(start, stop)

    try:
        # A list, so that an error of any range is raised.
        is_same = file.size() == size and all(list(_TRANSFERS.map(compare, _byte_ranges(size))))
    except CheckpointError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            raise  # the store failed: the file may be intact
        return str(error)  # the file is missing or damaged
    return "" if is_same else f"{file.url}: differs from {path}"
