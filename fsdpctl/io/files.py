"""Files that somebody else may have made: opened without being led astray."""

import os
import re
import stat
from pathlib import Path

from fsdpctl.errors import FsdpctlError, UsageError

Refusal = type[FsdpctlError]
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")


def plain_name(name: object, pattern: str, where: str, refusal: Refusal) -> str:
    """`name`, if it is a file's name alone and of the form `pattern`.

    Raises:
        FsdpctlError: of the kind `refusal`; it is not.
    """
    if isinstance(name, str) and _PLAIN.fullmatch(name) and re.fullmatch(pattern, name):
        return name
    raise refusal(f"{where}: {str(name)[:80]!r} is not the name of such a file")


def open_regular(path: Path, refusal: Refusal = UsageError, *, follows: bool = False) -> int:
    """A descriptor of a regular file in its folder; a pipe is not waited for.

    Links are followed within the folder, into the cache of huggingface_hub, and, where somebody
    named the file and no other file did, everywhere (`follows`).

    Raises:
        FsdpctlError: of the kind `refusal`; it is missing, no regular file, or leads elsewhere.
    """
    try:
        real = Path(os.path.realpath(path))
        if not (follows or _stays_inside(path, real)):
            raise refusal(f"{path}: leads out of its folder, to {real}; copy the file there")
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    except OSError as error:
        raise refusal(f"{path}: {error.strerror}") from None
    raise refusal(f"{path}: no regular file")


def _stays_inside(path: Path, real: Path) -> bool:
    if Path(os.path.realpath(path.parent)) in real.parents:
        return True
    blobs = real.parent
    return blobs.name == "blobs" and blobs.parent.name.startswith("models--")


def read_regular(
    path: Path, most_bytes: int, refusal: Refusal = UsageError, *, follows: bool = False
) -> bytes:
    """The contents of a regular file of at most `most_bytes`.

    Raises:
        FsdpctlError: of the kind `refusal`; as `open_regular`, or it is larger.
    """
    with open(open_regular(path, refusal, follows=follows), "rb") as file:
        try:
            content = file.read(most_bytes + 1)
        except OSError as error:
            raise refusal(f"{path}: {error.strerror}") from None
    if len(content) > most_bytes:
        raise refusal(f"{path}: larger than the {most_bytes:,} bytes that such a file may have")
    return content


def read_text_file(
    path: Path, most_bytes: int, refusal: Refusal = UsageError, *, follows: bool = False
) -> str:
    """The text of a UTF-8 file, as `read_regular`."""
    try:
        return read_regular(path, most_bytes, refusal, follows=follows).decode("utf-8")
    except UnicodeDecodeError as error:
        raise refusal(f"{path}: not UTF-8: {error}") from None
