"""The checkpoints of a run: their names, the newest, and which are kept."""

import os
import re
import shutil
from pathlib import Path

from fsdpctl.checkpoint.manifest import MANIFEST
from fsdpctl.errors import CheckpointError, UsageError

CHECKPOINTS, LATEST = "checkpoints", "latest"
_STEP = re.compile(r"step-(\d{8,})")


def step_folder(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return checkpoints / f"step-{step:08d}"


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """The checkpoints that were finished, oldest first."""
    if not checkpoints.is_dir():
        return []
    found = [
        (int(match.group(1)), folder)
        for folder in checkpoints.iterdir()
        if (match := _STEP.fullmatch(folder.name)) and (folder / MANIFEST).is_file()
    ]
    return [folder for _, folder in sorted(found)]


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """The newest finished checkpoint, or None.

    Raises:
        CheckpointError: a newer one has lost its manifest.
    """
    newest = next(reversed(complete_checkpoints(checkpoints)), None)
    folders = checkpoints.iterdir() if checkpoints.is_dir() else ()
    for folder in folders:
        if _STEP.fullmatch(folder.name) and (newest is None or folder.name > newest.name):
            raise CheckpointError(
                f"{folder / MANIFEST}: missing: the newest checkpoint is damaged; without its "
                f"directory, {newest.name if newest else 'nothing'} is the newest"
            )
    return newest


def find_checkpoint(source: Path) -> Path:
    """The checkpoint meant by a run directory, a checkpoints directory or a checkpoint itself.

    Raises:
        UsageError: there is none.
    """
    if not source.is_dir():
        raise UsageError(f"{source}: no such directory")
    if (source / MANIFEST).is_file() or _STEP.fullmatch(source.resolve().name):
        return source
    for folder in (source / CHECKPOINTS, source):
        newest = newest_checkpoint(folder)
        if newest is not None:
            return newest
    raise UsageError(f"{source}: there is no finished checkpoint in it")


def point_to(link: Path, target: Path) -> None:
    """Make `link` a symbolic link to its neighbour `target`, replacing what it was at once."""
    scratch = link.with_name(f"{link.name}.tmp-{os.getpid()}")
    scratch.unlink(missing_ok=True)
    scratch.symlink_to(os.path.relpath(target, link.parent))
    scratch.replace(link)


def copy_checkpoint(source: Path, folder: Path) -> None:
    """Copy a checkpoint; it appears complete or not at all."""
    scratch = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    shutil.copytree(source, scratch)
    scratch.rename(folder)


def remove_unfinished(checkpoints: Path) -> None:
    """Delete what saves that were cut short left behind. Only while no save is running."""
    for folder in checkpoints.glob("step-*.tmp-*"):
        shutil.rmtree(folder, ignore_errors=True)


def remove_old(checkpoints: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` checkpoints; 0 keeps them all."""
    if keep_last == 0:
        return
    for folder in complete_checkpoints(checkpoints)[:-keep_last]:
        # Without its manifest a half-deleted checkpoint is none.
        (folder / MANIFEST).unlink()
        shutil.rmtree(folder, ignore_errors=True)
