"""The checkpoints of a run in an object store, uploaded file by file.

Each file is read back and compared, and the manifest comes last: a checkpoint without it is
incomplete, and is never read.
"""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from fsdpctl.checkpoint.folders import best_name, doomed, find_checkpoint, step_of
from fsdpctl.checkpoint.manifest import Manifest, read_manifest
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.remote import TRANSFERS, RemoteReader, fetch_manifest, ranges_of
from fsdpctl.config.schema import Config
from fsdpctl.config.sources import is_remote
from fsdpctl.config.training import CheckpointConfig
from fsdpctl.errors import CheckpointError, FsdpctlError, UsageError
from fsdpctl.io.run_files import MANIFEST, STEP
from fsdpctl.io.stores import StoredFile, asked, open_store

KEY = "checkpoint.remote"
_ATTEMPTS = 3  # to upload a file, if it is not the same when read back


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A complete checkpoint in a store, by its manifest."""

    place: StoredFile
    step: int
    manifest: Manifest

    @property
    def url(self) -> str:
        return self.place.url

    def open(self) -> RemoteReader:
        return RemoteReader(self.place)


class RemoteCheckpoints:
    """The checkpoints of a run in an object store, each in a directory of its step."""

    def __init__(self, url: str, where: str = "") -> None:
        """Open the store of a URL; errors of the URL begin with `where`."""
        self.url = url.rstrip("/")
        self._root = open_store(self.url, where or self.url, CheckpointError)
        if hasattr(self._root.store, "auto_mkdir"):  # of a file system, which needs directories
            self._root.store.auto_mkdir = True

    def _found(self) -> dict[Path, bool]:
        """Return the names of the checkpoints, oldest first, and whether each is complete."""
        store, root = self._root.store, self._root.path
        store.invalidate_cache()
        try:
            # Not `find` and `exists`, which take a store that fails for one without the file.
            found = asked(self.url, lambda: store.ls(root, detail=False), UsageError)
        except UsageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            found = []
        names = {each.rstrip("/").rpartition("/")[2] for each in found}
        steps = sorted((Path(each) for each in names if STEP.fullmatch(each)), key=step_of)
        manifests = (self._root.inside(each.name).inside(MANIFEST) for each in steps)
        return dict(zip(steps, TRANSFERS.map(StoredFile.exists, manifests), strict=True))

    def complete(self) -> list[Path]:
        return [name for name, is_whole in self._found().items() if is_whole]

    def newest(self) -> "StoredCheckpoint | None":
        """Return the newest complete checkpoint, if any; an error suggests an older one."""
        found = self.complete()
        if not found:
            return None
        place = self._root.inside(found[-1].name)
        try:
            with TemporaryDirectory() as folder:
                manifest = fetch_manifest(place, Path(folder))
        except CheckpointError as error:
            older = f"{self.url}/{found[-2].name}" if found[1:] else ""
            hint = f"; --resume {older} starts a new run from the previous one" if older else ""
            raise CheckpointError(f"{error}{hint}") from None
        return StoredCheckpoint(place, step_of(found[-1]), manifest)

    def open(self, name: str) -> RemoteReader:
        """Open a checkpoint of the run; CheckpointError if it is incomplete or corrupted."""
        return RemoteReader(self._root.inside(name))

    def named(self, run: str) -> "RemoteCheckpoints":
        return RemoteCheckpoints(f"{self.url.rpartition('/')[0]}/{run}")

    def check_writable(self) -> None:
        """Write a file and delete it; UsageError if the store does not allow it."""
        probe = self._root.inside("write-check")
        asked(probe.url, lambda: probe.store.pipe_file(probe.path, b"fsdpctl"), UsageError)
        probe.remove()

    def upload(self, folder: Path) -> None:
        """Upload a complete checkpoint, unless it is there."""
        place = self._root.inside(folder.name)
        here, manifest = folder / MANIFEST, place.inside(MANIFEST)
        if manifest.exists():
            if not _difference(here, manifest):
                return
            manifest.remove()  # first: the other checkpoint is incomplete from now on
        about = read_manifest(folder)
        for name in (*about.files, *about.attachments):
            _upload_file(folder / name, place.inside(name))
        try:
            _upload_file(here, manifest)
        except FsdpctlError:
            manifest.remove()
            raise

    def remove_old(self, keep: CheckpointConfig, newest: Path) -> None:
        """Delete the checkpoints that `keep` does not keep, and incomplete ones before `newest`."""
        spared = {newest.name, best_name(newest) if keep.keep_best else ""}
        found = self._found()
        whole = [each for each, is_whole in found.items() if is_whole]
        parts = [each for each in found if each not in whole and step_of(each) < step_of(newest)]
        for each in (*doomed(whole, keep, spared), *parts):
            place = self._root.inside(each.name)
            place.inside(MANIFEST).remove()
            place.remove(recursive=True)


def remote_of(config: Config) -> RemoteCheckpoints | None:
    """Return the checkpoints of a run in its object store, below the name of its directory."""
    url, run_dir = config.checkpoint.remote, config.train.run_dir
    if url is None or run_dir is None:
        return None
    name = Path(os.path.abspath(run_dir)).name  # of "." too
    return RemoteCheckpoints(f"{url.rstrip('/')}/{name}", f"{KEY}={url}")


def open_checkpoint(source: str) -> CheckpointReader:
    """Open the newest checkpoint of a run, or a checkpoint: of a path here or a URL."""
    if not is_remote(source):
        return CheckpointReader(find_checkpoint(Path(source).expanduser()))
    above, _, name = source.rstrip("/").rpartition("/")
    if STEP.fullmatch(name):
        return RemoteCheckpoints(above).open(name)
    newest = RemoteCheckpoints(source).newest()
    if newest is None:
        raise UsageError(f"{source}: no complete checkpoint found; expected that of a run, or one")
    return newest.open()


def _upload_file(path: Path, file: StoredFile) -> None:
    """Upload a file until it is the same when read back; it may be there already."""
    if file.exists() and not _difference(path, file):
        return
    for _ in range(_ATTEMPTS):
        asked(file.url, partial(file.store.put_file, str(path), file.path))
        difference = _difference(path, file)
        if not difference:
            return
    raise FsdpctlError(f"{difference} (uploaded and read back {_ATTEMPTS} times)")


def _difference(path: Path, file: StoredFile) -> str:
    """Return how a file in the store differs from one here; CheckpointError without an answer."""
    size = path.stat().st_size

    def compare(part: tuple[str, int, int]) -> bool:
        _, start, stop = part
        with path.open("rb", buffering=0) as here:
            return os.pread(here.fileno(), stop - start, start) == file.read(start, stop)

    try:
        is_same = file.size() == size and all(list(TRANSFERS.map(compare, ranges_of({"": size}))))
    except CheckpointError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            raise  # it cannot be read now, which says nothing about it
        return str(error)  # lost or damaged there
    return "" if is_same else f"{file.url}: differs from {path}"
