"""Directories that are published atomically: exports, and checkpoints with their manifest."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex

from fsdpctl.checkpoint.manifest import (
    ASSETS,
    INDEX_JSON,
    BaseInfo,
    FileInfo,
    Manifest,
    TensorInfo,
    checksum,
)
from fsdpctl.checkpoint.tensor_file import fsync, open_tensor_file, write_synced
from fsdpctl.checkpoint.training_progress import Progress
from fsdpctl.config.peft import ADAPTER_CONFIG
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.io.files import os_errors_as, read_regular
from fsdpctl.io.packages import versions
from fsdpctl.io.run_files import CHECKPOINTS, CHECKSUMS, MANIFEST

_SPARE_BYTES = 1 << 20  # for the manifest and directory entries
EXPORT_METADATA = {"fsdpctl": "consolidated"}  # metadata of exported tensor files
CARD = "README.md"
_CHECKSUM_MARK = b"\n<!-- fsdpctl "  # precedes a model card's checksum, which detects edits


@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """The contents of a checkpoint other than its tensors."""

    progress: Progress = field(default_factory=Progress)
    config: Mapping[str, str] = field(default_factory=dict)  # settings by key
    attachments: Mapping[str, bytes] = field(default_factory=dict)  # files by name
    base: BaseInfo | None = None  # where untrained weights are stored; None: in the checkpoint


def space_problem(folder: Path, nbytes: int) -> str:
    """Return a message if there is no space for `nbytes` below `folder`, or ""."""
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        free = shutil.disk_usage(existing).free
    except OSError:
        return ""  # writing will fail if there isn't enough
    needed = nbytes + _SPARE_BYTES
    return "" if free >= needed else f"no space left: {needed:,} bytes needed, {free:,} free"


def check_space(destination: Path, nbytes: int) -> None:
    """Check that `nbytes` fit next to `destination`; UsageError if they do not."""
    if problem := space_problem(destination.parent, nbytes):
        raise UsageError(f"{destination}: {problem}")


@contextmanager
def atomic_directory(folder: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Yield a new directory that becomes `folder`, or `replaces` it, if the block succeeds."""
    scratch = folder.with_name(f"{folder.name}.tmp-{token_hex(4)}")  # containers repeat process IDs
    try:
        scratch.mkdir(parents=True)
        yield scratch
        publish_directory(scratch, folder, replaces=replaces)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def publish_directory(scratch: Path, folder: Path, *, replaces: bool = False) -> None:
    """Rename the directory `scratch` to `folder`. If this fails, an old `folder` stays."""
    fsync(scratch)
    if replaces and folder.exists():
        previous = folder.with_name(f"{folder.name}.old-{token_hex(4)}")
        folder.rename(previous)
        try:
            scratch.rename(folder)
        except BaseException:
            previous.rename(folder)
            raise
        shutil.rmtree(previous)
    else:
        scratch.rename(folder)  # fails if another process has created `folder`
    fsync(folder.parent)


def write_manifest(
    folder: Path,
    metadata: CheckpointMetadata,
    files: Mapping[str, FileInfo],
    tensors: Mapping[str, TensorInfo],
    world_size: int,
) -> None:
    """Write the attachments and the manifest of the tensor files in `folder`."""
    attached = {name: FileInfo(len(x), checksum(x)) for name, x in metadata.attachments.items()}
    manifest = Manifest(
        files=dict(files), attachments=attached, tensors=dict(sorted(tensors.items())),
        progress=metadata.progress, config=dict(metadata.config), versions=versions(),
        world_size=world_size, base=metadata.base,
    )  # fmt: skip
    write_assets(folder, metadata.attachments)
    write_synced(folder / MANIFEST, manifest.to_json().encode())


def write_assets(folder: Path, assets: Mapping[str, bytes]) -> None:
    """Write files next to weights into a new directory; their names may include a subdirectory."""
    for name, content in assets.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_synced(folder / name, content)
        if (folder / name).parent != folder:
            fsync((folder / name).parent)


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The result of an export."""

    path: Path
    num_bytes: int
    num_tensors: int
    notes: tuple[str, ...]  # lines about missing and differing files or values
    num_files: int = 1


@contextmanager
def export_directory(destination: Path, source: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a new directory for an export of `source`.

    It is renamed to `destination` if the block succeeds. UsageError if `destination` exists and is
    not an export that `overwrite` replaces, or if it is, contains or is in the run of `source`.
    """
    check_destination(destination, overwrite=overwrite)
    folder = source.resolve()
    checkpoints = folder.parent if folder.parent.name == CHECKPOINTS else folder
    if destination in (folder, *folder.parents) or checkpoints in destination.parents:
        problem = f"conflicts with the checkpoint {folder}; pass another directory"
        raise UsageError(f"{destination}: {problem}")
    with os_errors_as(destination), atomic_directory(destination, replaces=overwrite) as scratch:
        yield scratch


def check_destination(destination: Path, *, overwrite: bool) -> None:
    """Check that `destination` does not exist or is empty, or is an export to overwrite."""
    if destination.exists() and not destination.is_dir():
        raise UsageError(f"{destination}: expected a directory, got a file")
    if not destination.is_dir() or not any(destination.iterdir()):
        return
    if not overwrite:
        raise UsageError(f"{destination}: already exists; pass --overwrite to replace an export")
    if not all(map(_is_export_file, destination.iterdir())):
        raise UsageError(f"{destination}: not an earlier export; --overwrite replaces only exports")


def card_with_checksum(text: str) -> bytes:
    """Return a model card whose last line is a checksum of the text before it."""
    return b"%s%s%s -->\n" % (text.encode(), _CHECKSUM_MARK, checksum(text.encode()).encode())


def _is_export_file(file: Path) -> bool:
    if file.name == CARD:
        content = read_regular(file)
        return (
            card_with_checksum(content.rpartition(_CHECKSUM_MARK)[0].decode(errors="replace"))
            == content
        )
    if file.suffix != ".safetensors":
        return file.name in (INDEX_JSON, ADAPTER_CONFIG, CHECKSUMS, *ASSETS)
    try:
        return EXPORT_METADATA.keys() <= open_tensor_file(file).metadata.keys()
    except CheckpointError:
        return False
