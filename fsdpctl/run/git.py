"""Which commit a folder is at, and whether its files are that commit's, without trusting it.

A repository's own configuration can name programs that git runs: filters, a file system monitor.
So the commit is read from files, and git compares under a directory of its own that has none of
that: nothing but the repository's objects and its index.
"""

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fsdpctl.errors import UsageError
from fsdpctl.io.documents import MIB
from fsdpctl.io.files import read_text_file

_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_NAME = re.compile(r"refs/[\w./+@-]+")
_MOST_REFS_BYTES = 16 * MIB
_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Revision:
    """Where a checkout stands."""

    commit: str
    dirty: bool | None  # whether tracked files differ from it; None where git does not say


def revision(folder: Path) -> Revision | None:
    """Of the checkout that `folder` lies in; None if it lies in none."""
    for root in (folder, *folder.parents):
        if (root / ".git").exists():
            try:
                own, shared = _git_folders(root)
                commit = _commit(own, shared)
            except (UsageError, OSError):
                return None
            return (
                None if commit is None else Revision(commit, _is_dirty(root, own, shared, commit))
            )
    return None


def _git_folders(root: Path) -> tuple[Path, Path]:
    """What is this checkout's own, and what all checkouts of the repository share."""
    own = root / ".git"
    if own.is_file():
        own = root / _line(own).removeprefix("gitdir: ")
    link = own / "commondir"
    return own, own / _line(link) if link.is_file() else own


def _line(path: Path) -> str:
    return read_text_file(path, 4096).strip()


def _commit(own: Path, shared: Path) -> str | None:
    head = _line(own / "HEAD")
    if _HASH.fullmatch(head):
        return head
    name = head.removeprefix("ref: ")
    if not _NAME.fullmatch(name) or ".." in name:
        return None
    for place in (own, shared):
        if (place / name).is_file():
            found = _line(place / name)
            return found if _HASH.fullmatch(found) else None
    if not (shared / "packed-refs").is_file():
        return None
    for line in read_text_file(shared / "packed-refs", _MOST_REFS_BYTES).splitlines():
        found, _, of = line.partition(" ")
        if of == name and _HASH.fullmatch(found):
            return found
    return None


def _is_dirty(root: Path, own: Path, shared: Path, commit: str) -> bool | None:
    """Whether what is tracked differs; untracked files and submodules are not looked at."""
    with tempfile.TemporaryDirectory(prefix="fsdpctl-git-") as scratch:
        plain = Path(scratch)
        try:
            (plain / "objects" / "info").mkdir(parents=True)
            (plain / "refs").mkdir()
            (plain / "HEAD").write_text(f"{commit}\n")
            objects = (shared / "objects").resolve()
            (plain / "objects" / "info" / "alternates").write_text(f"{objects}\n")
            shutil.copyfile(own / "index", plain / "index")
            done = subprocess.run(
                ["git", "-c", "core.fsmonitor=false", "diff", "--quiet", "--no-ext-diff",
                 "--ignore-submodules=all", "HEAD", "--"],
                cwd=root, env=_environment(plain, root), timeout=_SECONDS, check=False,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
    return {0: False, 1: True}.get(done.returncode)


def _environment(plain: Path, root: Path) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    return {
        **kept,
        "GIT_DIR": str(plain),
        "GIT_WORK_TREE": str(root),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_OPTIONAL_LOCKS": "0",
    }
