"""Files that somebody else may have made: opened without being led astray."""

import os
import re
import stat
from pathlib import Path

from fsdpctl.errors import FsdpctlError, UsageError

Refusal = type[FsdpctlError]
# The cache of huggingface_hub keeps files once, in `blobs`, and links to them from `snapshots/X`.
_CACHE_FOLDERS = ("snapshots", "blobs")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")


def plain_name(name: object, pattern: str, where: str, refusal: Refusal) -> str:
    """`name`, if it is a file's name alone and of the form `pattern`.

    Raises:
        FsdpctlError: of the kind `refusal`; it is not.
    """
    if isinstance(name, str) and _PLAIN.fullmatch(name) and re.fullmatch(pattern, name):
        return name
    raise refusal(f"{where}: {str(name)[:80]!r} is not the name of such a file")


def open_regular(path: Path, refusal: Refusal = UsageError) -> int:
    """A descriptor of a regular file in its folder; a pipe is not waited for.

    Links are followed within the folder, and within a cache of huggingface_hub.

    Raises:
        FsdpctlError: of the kind `refusal`; it is missing, no regular file, or leads elsewhere.
    """
    try:
        real = Path(os.path.realpath(path))
        if not _stays_inside(path, real):
            raise refusal(f"{path}: leads out of its folder, to {real}; copy the file there")
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    except OSError as error:
        raise refusal(f"{path}: {error.strerror}") from None
    raise refusal(f"{path}: no regular file")


def _stays_inside(path: Path, real: Path) -> bool:
    folder = Path(os.path.realpath(path.parent))
    if folder in real.parents:
        return True
    snapshots, blobs = _CACHE_FOLDERS
    cache = folder.parent.parent
    return folder.parent.name == snapshots and real.parent == cache / blobs


def read_regular(path: Path, most_bytes: int, refusal: Refusal = UsageError) -> bytes:
    """The contents of a regular file of at most `most_bytes`.

    Raises:
        FsdpctlError: of the kind `refusal`; as `open_regular`, or it is larger.
    """
    with open(open_regular(path, refusal), "rb") as file:
        try:
            content = file.read(most_bytes + 1)
        except OSError as error:
            raise refusal(f"{path}: {error.strerror}") from None
    if len(content) > most_bytes:
        raise refusal(f"{path}: larger than the {most_bytes:,} bytes that such a file may have")
    return content


def read_text_file(path: Path, most_bytes: int, refusal: Refusal = UsageError) -> str:
    """The text of a UTF-8 file, as `read_regular`."""
    try:
        return read_regular(path, most_bytes, refusal).decode("utf-8")
    except UnicodeDecodeError as error:
        raise refusal(f"{path}: not UTF-8: {error}") from None
