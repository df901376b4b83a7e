"""The checkpoints of a run: their names, the newest, and which are kept."""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.tensor_file import sync
from fsdpctl.config.model_path import CHECKPOINTS, is_hugging_face
from fsdpctl.config.sealed import MANIFEST
from fsdpctl.errors import CheckpointError, UsageError

LATEST = "latest"
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
        if (match := _STEP.fullmatch(folder.name)) and _is_checkpoint(folder)
    ]
    return [folder for _, folder in sorted(found)]


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """The newest finished checkpoint, or None."""
    return next(reversed(complete_checkpoints(checkpoints)), None)


def passed_over(checkpoints: Path) -> list[str]:
    """What looks newer than the newest finished checkpoint and is none, a sentence each."""
    newest = newest_checkpoint(checkpoints)
    other = f"the newest complete checkpoint is {newest.name}" if newest else "no other is complete"
    at = step_of(newest) if newest else -1
    folders = sorted(checkpoints.iterdir()) if checkpoints.is_dir() else []
    found = [
        f"{folder} is incomplete, without {MANIFEST}; {other}"
        for folder in folders
        if _STEP.fullmatch(folder.name) and step_of(folder) > at and not _is_checkpoint(folder)
    ]
    link = checkpoints / LATEST
    if (link.is_symlink() or link.exists()) and not found and not _is_checkpoint(link):
        found.append(f"{link} leads to no checkpoint; {other}")
    return found


def way_on(damaged: Path) -> str:
    """What to do without a checkpoint: a clause for its error, empty where there is no other."""
    at = step_of(damaged)
    others = [each for each in complete_checkpoints(damaged.parent) if step_of(each) < at]
    return f"; --resume {others[-1]} starts a new run from the one before" if others else ""


def _is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).exists()


def find_checkpoint(source: Path) -> Path:
    """The checkpoint meant by a run directory, a checkpoints directory or a checkpoint itself.

    Raises:
        UsageError: there is none.
        CheckpointError: there are only incomplete ones.
    """
    if not source.is_dir():
        raise UsageError(f"{source}: no such directory")
    if _is_checkpoint(source) or _STEP.fullmatch(source.resolve().name):
        return source
    newest = newest_checkpoint(_checkpoints_in(source))
    if newest is not None:
        return newest
    for line in passed_over(_checkpoints_in(source)):
        raise CheckpointError(line)
    already = ""
    if is_hugging_face(source):
        already = "; it is a Hugging Face directory: model=hf model.path=, sample, evaluate read it"
    raise UsageError(f"{source}: there is no finished checkpoint in it{already}")


def passed_over_in(source: Path) -> list[str]:
    """What `find_checkpoint(source)` has passed over, a sentence each."""
    return [] if find_checkpoint(source) == source else passed_over(_checkpoints_in(source))


def _checkpoints_in(source: Path) -> Path:
    inside = source / CHECKPOINTS
    return inside if inside.is_dir() else source


def point_to(link: Path, target: Path) -> None:
    """Make `link` a symbolic link to its neighbour `target`, replacing what it was at once.

    Raises:
        OSError: it cannot be made, or is a directory.
    """
    scratch = link.with_name(f"{link.name}.tmp-{os.getpid()}")
    scratch.unlink(missing_ok=True)
    scratch.symlink_to(os.path.relpath(target, link.parent))
    try:
        scratch.replace(link)
    finally:
        scratch.unlink(missing_ok=True)


def copy_checkpoint(source: Path, folder: Path) -> None:
    """Copy a checkpoint whose every byte is checked; it appears complete or not at all.

    Raises:
        CheckpointError: it is damaged.
        OSError: it cannot be copied.
    """
    for _ in CheckpointReader(source).verify():
        pass
    scratch = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    try:
        scratch.mkdir(parents=True)
        for file in source.iterdir():
            shutil.copyfile(file, scratch / file.name)
            sync(scratch / file.name)
        sync(scratch)
        scratch.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def remove_unfinished(checkpoints: Path) -> None:
    """Delete what saves that were cut short left behind. Only while no save is running."""
    for folder in checkpoints.glob("step-*.tmp-*"):
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints are kept."""

    last: int  # so many of the newest; 0: all
    every: int = 0  # and those whose step is a multiple of it; 0: none

    def keeps(self, step: int) -> bool:
        """Whether the checkpoint of a step is kept however old it is."""
        return self.last == 0 or (self.every > 0 and step % self.every == 0)


def remove_old(checkpoints: Path, keep: Retention, spared: Path | None = None) -> None:
    """Delete the checkpoints that are not kept, but for the one that is `spared`.

    Raises:
        OSError: one cannot be deleted.
    """
    for folder in complete_checkpoints(checkpoints)[: -keep.last or None]:
        is_spared = spared is not None and spared.name == folder.name
        if not (is_spared or keep.keeps(step_of(folder))):
            # What is deleted half is no checkpoint, and `remove_unfinished` finds it.
            doomed = folder.with_name(f"{folder.name}.tmp-removed")
            folder.rename(doomed)
            shutil.rmtree(doomed)


def step_of(folder: Path) -> int:
    """The step in a checkpoint's name."""
    match = _STEP.fullmatch(folder.name)
    assert match is not None
    return int(match.group(1))
