"""Where exports go: a directory that appears complete or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdpctl.checkpoint.pretrained import ASSETS, INDEX_JSON
from fsdpctl.checkpoint.tensor_file import open_tensor_file, sync
from fsdpctl.config.model_path import CHECKPOINTS
from fsdpctl.config.peft import ADAPTER_CONFIG
from fsdpctl.errors import CheckpointError, UsageError

WRITTEN = {"fsdpctl": "consolidated"}  # in the metadata of tensor files that are written


@contextmanager
def new_folder(destination: Path, source: Path, *, overwrite: bool) -> Iterator[Path]:
    """A directory to write into, which becomes `destination` if the block ends well.

    Args:
        destination: does not exist yet.
        source: the checkpoint that is read meanwhile.
        overwrite: replace an earlier export.

    Raises:
        UsageError: the destination exists, or cannot be written.
    """
    refuse_existing(destination, overwrite=overwrite)
    _refuse_source(source.resolve(), destination)
    scratch = destination.with_name(f"{destination.name}.tmp-{os.getpid()}")
    try:
        scratch.mkdir(parents=True)
        yield scratch
        sync(scratch)
        _put_in_place(scratch, destination, overwrite=overwrite)
    except OSError as error:
        raise UsageError(f"{destination}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def refuse_existing(destination: Path, *, overwrite: bool) -> None:
    """Raise UsageError unless `destination` may be written: it is not there, or an old export."""
    if destination.exists() and not destination.is_dir():
        raise UsageError(f"{destination}: is a file; give a directory")
    if not destination.is_dir() or not any(destination.iterdir()):
        return
    if not overwrite:
        raise UsageError(f"{destination}: exists already; --overwrite replaces an earlier export")
    if not all(map(_is_of_an_export, destination.iterdir())):
        raise UsageError(f"{destination}: is no earlier export; --overwrite replaces only those")


def _is_of_an_export(file: Path) -> bool:
    """Whether an export has written it."""
    if file.suffix != ".safetensors":
        return file.name in (INDEX_JSON, ADAPTER_CONFIG, *ASSETS)
    try:
        return WRITTEN.keys() <= open_tensor_file(file).metadata.keys()
    except CheckpointError:
        return False


def _refuse_source(folder: Path, destination: Path) -> None:
    inside = folder.parent if folder.parent.name == CHECKPOINTS else folder
    if destination in (folder, *folder.parents) or inside in destination.parents:
        raise UsageError(f"{destination}: is where the checkpoint {folder} lies; give another")


def _put_in_place(scratch: Path, destination: Path, *, overwrite: bool) -> None:
    if overwrite and destination.exists():
        aside = destination.with_name(f"{destination.name}.old-{os.getpid()}")
        destination.rename(aside)
        try:
            scratch.rename(destination)
        except BaseException:
            aside.rename(destination)
            raise
        shutil.rmtree(aside)
    else:
        scratch.rename(destination)  # refused by the kernel if something lies there by now
    sync(destination.parent)
