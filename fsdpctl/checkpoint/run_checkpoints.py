"""The checkpoints of a run: their names, the newest checkpoint, and which checkpoints to keep."""

import errno
import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fsdpctl.checkpoint.manifest import read_manifest
from fsdpctl.checkpoint.publish import atomic_directory
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.config.model_path import is_foreign_model
from fsdpctl.config.peft import ADAPTER_CONFIG
from fsdpctl.config.training import CheckpointConfig
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.io import run_files
from fsdpctl.io.activity import BYTES, doing
from fsdpctl.io.files import nearest_run_hint, newest_runs_hint, read_regular

_URL = re.compile(r"[a-z][a-z0-9+.-]+:/")  # pathlib reduces :// to :/
_MAX_LISTED = 3  # incomplete checkpoints that are listed, each in a line
OLDER_HINT = "; --resume {} starts a new run from that checkpoint"


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    match = run_files.STEP.fullmatch(folder.name)
    assert match is not None
    return int(match.group(1))


def _steps_in(checkpoints: Path) -> list[Path]:
    """Return the checkpoints, complete or not, oldest first; UsageError for other links."""
    run_files.check_checkpoint_dirs(checkpoints)
    folders = checkpoints.iterdir() if checkpoints.is_dir() else ()
    return sorted((each for each in folders if run_files.STEP.fullmatch(each.name)), key=step_of)


def _is_complete(folder: Path) -> bool:
    return (folder / run_files.MANIFEST).exists()


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    return list(filter(_is_complete, _steps_in(checkpoints)))


def newest_checkpoint(checkpoints: Path) -> Path | None:
    return next(filter(_is_complete, reversed(_steps_in(checkpoints))), None)


def best_checkpoint_name(folder: Path) -> str:
    """Return the name of the best checkpoint at the time when `folder` was saved, or ""."""
    best = read_manifest(folder).progress.best
    return "" if best is None else step_folder(folder, best.step).name


def describe_incomplete(checkpoints: Path) -> list[str]:
    """Describe incomplete checkpoints that are newer than the newest complete one."""
    newest, newest_step, fallback = newest_checkpoint(checkpoints), -1, "no checkpoint is complete"
    if newest is not None:
        newest_step, fallback = step_of(newest), f"the newest complete checkpoint is {newest.name}"
    newer = [each for each in _steps_in(checkpoints) if step_of(each) > newest_step]
    lines = [
        f"{folder}: incomplete: {run_files.MANIFEST} not found; {fallback}"
        for folder in newer[:_MAX_LISTED]
        if not _is_complete(folder)  # a save may have just ended
    ]
    if more := len(newer[_MAX_LISTED:]):
        lines.append(f"{checkpoints}: {more:,} more incomplete checkpoints")
    link = checkpoints / run_files.LATEST
    if (link.is_symlink() or link.exists()) and not lines and not _is_complete(link):
        lines.append(f"{link}: does not point to a checkpoint; {fallback}")
    return lines


def older_checkpoint_hint(damaged: Path) -> str:
    """Return the end of a message that suggests a run from an older checkpoint, or ""."""
    step = step_of(damaged)
    older = [each for each in complete_checkpoints(damaged.parent) if step_of(each) < step]
    return OLDER_HINT.format(older[-1]) if older else ""


def find_checkpoint(source: Path) -> Path:
    """Return `source` if it is a checkpoint, else the newest one in this run or directory."""
    if not source.is_dir():
        if source.exists():
            raise UsageError(f"{source}: expected a directory, got a file")
        if _URL.match(str(source)):
            raise UsageError(
                f"{source}: object stores are not supported here; to download it, pass the URL "
                "to `fsdpctl consolidate-checkpoint` or to train --resume"
            )
        raise UsageError(f"{source}: directory not found{nearest_run_hint(source)}")
    if not (source / run_files.RUN_CONFIG).is_file() and (runs_hint := newest_runs_hint(source)):
        raise UsageError(f"{source}: holds runs; expected one of them{runs_hint}")
    run_files.check_run_files(source)
    if _is_complete(source) or run_files.STEP.fullmatch(source.resolve().name):
        return source
    newest = newest_checkpoint(_checkpoints_in(source))
    if newest is not None:
        return newest
    if lines := describe_incomplete(_checkpoints_in(source)):
        raise CheckpointError(lines[0])
    hint = ""
    if is_foreign_model(source):
        hint = (
            ". It is a Hugging Face directory: pass it as model=hf model.path=DIR, to `fsdpctl "
            "sample` or `fsdpctl evaluate`, or to `fsdpctl verify-checkpoint` with --base"
        )
    elif (source / ADAPTER_CONFIG).is_file():
        hint = (
            ". It has only PEFT adapters, without the model: pass the run that trained them, or a "
            "full export of that run"
        )
    raise UsageError(f"{source}: no complete checkpoint found{hint}")


def describe_incomplete_in(source: Path) -> list[str]:
    """Describe the incomplete checkpoints that `find_checkpoint(source)` skips."""
    if find_checkpoint(source) == source:
        return []
    return describe_incomplete(_checkpoints_in(source))


def _checkpoints_in(source: Path) -> Path:
    checkpoints = source / run_files.CHECKPOINTS
    return checkpoints if checkpoints.is_dir() else source


def replace_link(link: Path, target: Path) -> str:
    """Make `link` a symbolic link to `target` in the same directory, atomically.

    Return the problem, or "". A save only warns of it: some file systems have no links.
    """
    scratch, problem = link.with_name(f"{link.name}.tmp-{os.getpid()}"), ""
    with suppress(OSError):
        scratch.unlink()
    try:
        scratch.symlink_to(os.path.relpath(target, link.parent))
        scratch.replace(link)
    except OSError as error:
        problem = f"{link}: cannot link to {target.name}: {error.strerror}"
        for each in (scratch, link):  # a link to an older checkpoint would mislead
            with suppress(OSError):
                each.unlink()
    return problem


def restore_links(checkpoints: Path) -> None:
    """Restore links to checkpoints if a program that follows links has copied the directory."""
    complete = complete_checkpoints(checkpoints)
    for link in (checkpoints / run_files.LATEST, checkpoints / run_files.BEST):
        originals = (each for each in complete if _is_copy(link, each))
        if (original := next(originals, None)) is not None:
            _delete(link, original)
            replace_link(link, original)
    if complete:
        replace_link(checkpoints / run_files.LATEST, complete[-1])


def _is_copy(link: Path, folder: Path) -> bool:
    """Return whether `link` is a directory that is a copy of a checkpoint, without other files."""
    if link.is_symlink() or not (link / run_files.MANIFEST).is_file():
        return False
    names = [{each.relative_to(top) for each in top.rglob("*")} for top in (link, folder)]
    manifest, original = (read_regular(each / run_files.MANIFEST) for each in (link, folder))
    # Manifests contain the checksums of all files.
    return manifest == original and names[0] <= names[1]


@contextmanager
def renamed_in_errors(folder: Path, source: str) -> Iterator[None]:
    """Replace `folder` by `source` in errors inside the block: users know only `source`."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(str(folder), source)) from None


def copy_checkpoint(source: CheckpointReader, folder: Path) -> None:
    """Copy a checkpoint and verify every byte; the copy appears complete or not at all."""
    with atomic_directory(folder) as scratch, renamed_in_errors(scratch, str(source)):
        source.copy_files(scratch)
        copy = CheckpointReader(scratch)
        with doing(f"verifying {source}", BYTES, copy.num_bytes) as advance:
            for count in copy.verify():
                advance(count)


def remove_interrupted_saves(checkpoints: Path) -> None:
    """Delete the remains of interrupted saves. Call it only if no save is running."""
    for folder in checkpoints.glob("step-*.tmp-*"):
        with suppress(RecursionError):  # other programs' directories may be nested too deeply
            shutil.rmtree(folder, ignore_errors=True)


def expired(
    complete: Sequence[Path], keep: CheckpointConfig, protected: Collection[str]
) -> list[Path]:
    """Return the checkpoints to delete, oldest first: `keep` and `protected` keep the others."""
    old = complete[: -keep.keep_last] if keep.keep_last else ()
    old, every = [each for each in old if each.name not in protected], keep.keep_every
    return [each for each in old if not (every and step_of(each) % every == 0)]


def remove_expired(
    checkpoints: Path, keep: CheckpointConfig, protected: Collection[str] = ()
) -> None:
    for folder in expired(complete_checkpoints(checkpoints), keep, protected):
        _delete(folder, folder)


def _delete(folder: Path, checkpoint: Path) -> None:
    """Delete `folder`. It is first renamed after `checkpoint`, so that a start removes the rest."""
    removed = checkpoint.with_name(f"{checkpoint.name}.tmp-removed")
    folder.rename(removed)
    try:
        shutil.rmtree(removed)
    except RecursionError:
        raise OSError(errno.ENAMETOOLONG, "nested too deeply", str(removed)) from None
