"""The last step of every write: attachments, the manifest, one rename."""

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from fsdpctl import __version__
from fsdpctl.checkpoint.manifest import BaseInfo, FileInfo, Manifest, Progress, TensorInfo
from fsdpctl.checkpoint.spans import checksum
from fsdpctl.checkpoint.tensor_file import sync, write_synced
from fsdpctl.config.sealed import MANIFEST

_SPARE_BYTES = 1 << 20  # for the manifest and what directories take


@dataclass(frozen=True, slots=True)
class About:
    """What a checkpoint says besides its tensors."""

    progress: Progress = field(default_factory=Progress)
    config: Mapping[str, str] = field(default_factory=dict)  # as words
    attachments: Mapping[str, bytes] = field(default_factory=dict)  # files, by name
    base: BaseInfo | None = None  # what has the weights that are not trained; None: they are saved


def lack_of_space(folder: Path, nbytes: int) -> str:
    """What is missing to write `nbytes` below `folder`; an empty string if nothing is."""
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        free = shutil.disk_usage(existing).free
    except OSError:
        return ""  # writing will tell
    needed = nbytes + _SPARE_BYTES
    return (
        "" if free >= needed else f"no space left: {needed:,} bytes are needed, {free:,} are there"
    )


def publish(
    scratch: Path,
    folder: Path,
    about: About,
    files: Mapping[str, FileInfo],
    tensors: Mapping[str, TensorInfo],
    world_size: int,
) -> None:
    """Make the tensor files in `scratch` the checkpoint `folder`.

    Raises:
        OSError: it could not.
    """
    attached = {
        name: FileInfo(len(content), checksum(content))
        for name, content in about.attachments.items()
    }
    versions = {"fsdpctl": __version__, "torch": version("torch")}
    manifest = Manifest(
        files=dict(files),
        attachments=attached,
        tensors=dict(sorted(tensors.items())),
        progress=about.progress,
        config=dict(about.config),
        versions={**versions, "python": sys.version.split()[0]},
        world_size=world_size,
        base=about.base,
    )
    for name, content in about.attachments.items():
        write_synced(scratch / name, content)
    write_synced(scratch / MANIFEST, manifest.to_json().encode())
    sync(scratch)
    scratch.rename(folder)
    sync(folder.parent)
