"""The directories that exports are written to."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fsdpctl.checkpoint.pretrained import ASSETS, INDEX_JSON
from fsdpctl.checkpoint.publish import new_directory
from fsdpctl.checkpoint.tensor_file import open_tensor_file
from fsdpctl.config.model_path import CHECKPOINTS
from fsdpctl.config.peft import ADAPTER_CONFIG
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.io.files import refusing

WRITTEN = {"fsdpctl": "consolidated"}  # in the metadata of exported tensor files


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export."""

    path: Path
    num_bytes: int
    num_tensors: int
    notes: tuple[str, ...]  # what is missing or differs, one line each
    files: int = 1


@contextmanager
def new_export(destination: Path, source: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a directory to write into, which becomes `destination` if the block succeeds.

    `source` is the checkpoint that is exported; `overwrite` replaces an earlier export.

    Raises:
        UsageError: If the destination exists or cannot be written.
    """
    check_destination(destination, overwrite=overwrite)
    _check_outside(source.resolve(), destination)
    with refusing(destination), new_directory(destination, replaces=overwrite) as folder:
        yield folder


def check_destination(destination: Path, *, overwrite: bool) -> None:
    """Check that `destination` does not exist, or is an earlier export to overwrite.

    Raises:
        UsageError: If it may not be written.
    """
    if destination.exists() and not destination.is_dir():
        raise UsageError(f"{destination}: expected a directory, got a file")
    if not destination.is_dir() or not any(destination.iterdir()):
        return
    if not overwrite:
        raise UsageError(f"{destination}: already exists; pass --overwrite to replace an export")
    if not all(map(_is_of_an_export, destination.iterdir())):
        raise UsageError(f"{destination}: not an earlier export; --overwrite replaces only exports")


def _is_of_an_export(file: Path) -> bool:
    """Return whether an export has written this file."""
    if file.suffix != ".safetensors":
        return file.name in (INDEX_JSON, ADAPTER_CONFIG, *ASSETS)
    try:
        return WRITTEN.keys() <= open_tensor_file(file).metadata.keys()
    except CheckpointError:
        return False


def _check_outside(folder: Path, destination: Path) -> None:
    inside = folder.parent if folder.parent.name == CHECKPOINTS else folder
    if destination in (folder, *folder.parents) or inside in destination.parents:
        raise UsageError(
            f"{destination}: conflicts with the checkpoint {folder}; pass another directory"
        )
