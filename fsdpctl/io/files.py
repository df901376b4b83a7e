"""Files, which may be untrusted: opened safely, read up to a limit, written whole."""

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from fsdpctl.errors import DISK_FULL, FsdpctlError, UsageError, did_you_mean
from fsdpctl.io.run_files import LATEST, RUN_CONFIG

_MOST_NAMED = 5  # runs
ErrorType = type[FsdpctlError]
MAX_READ_BYTES = 1 << 30  # of what is read whole: a file, or a line of one
_LAST_BYTES, _LONGEST = 4096, 300  # to search for the last line of a log; characters of it
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
_CACHE_INSTEAD = "FSDPCTL_CACHE"  # for the ranks that this process starts
_HASH = re.compile(r"[0-9a-f]{64}")


def checked_name(name: object, pattern: str, location: str, error_type: ErrorType) -> str:
    """Return `name`; raise `refusal` unless it is a plain file name that matches `pattern`."""
    if isinstance(name, str) and _PLAIN.fullmatch(name) and re.fullmatch(pattern, name):
        return name
    raise error_type(f"{location}: {str(name)[:80]!r} is not the name of such a file")


def nearest_path_hint(path: str) -> str:
    """Return `; did you mean X?` for the file or directory whose name is closest, or no text."""
    above, name = os.path.split(path)
    try:
        hint = did_you_mean(name, sorted(each for each in os.listdir(above or ".") if each != name))
    except OSError:
        return ""
    return hint.replace("mean ", f"mean {above.rstrip('/')}/", 1) if above else hint


def _runs_by_start(folder: Path) -> list[Path]:
    found = [each for each in folder.glob(f"*/{RUN_CONFIG}") if each.parent.name != LATEST]
    return [each.parent for each in sorted(found, key=os.path.getmtime)]


def latest_run(folder: Path) -> Path | None:
    """Return the run that the link `latest` leads to; without links, the one that started last."""
    if (link := folder / LATEST).is_symlink() and link.is_dir():
        return folder / Path(os.path.realpath(link)).name
    return next(reversed(_runs_by_start(folder)), None)


def newest_runs_hint(folder: Path) -> str:
    """Return `, such as` and the newest directories with a run; empty without any."""
    newest = sorted(map(str, _runs_by_start(folder)[-_MOST_NAMED:]))
    return f", such as {', '.join(newest)}" if newest else ""


def nearest_run_hint(run: Path) -> str:
    """Return, as `nearest_path`, which run is meant, or else the newest ones in its folder."""
    known = newest_runs_hint(run.parent)
    return nearest_path_hint(str(run)) or (f"; expected a run{known}" if known else "")


def open_regular(
    path: Path, error_type: ErrorType = UsageError, *, follow_links: bool = False
) -> int:
    """Open a regular file and return its descriptor, or raise `refusal`. No named pipe blocks.

    Symbolic links may lead to the same directory and, in a snapshot in the cache of
    huggingface_hub, to the files of its repository. With `follows`, for a path that the user typed,
    they may lead anywhere.
    """
    try:
        real, flags = path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        if not follow_links:
            real, flags = Path(os.path.realpath(path)), flags | os.O_NOFOLLOW
            if not _stays_inside(Path(os.path.realpath(path.parent)), real):
                problem = f"links to {real}, outside its directory; copy the file there"
                raise error_type(f"{path}: {problem}")
        descriptor = os.open(real, flags)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    except OSError as error:
        raise error_type(f"{path}: {error.strerror}") from None
    raise error_type(f"{path}: not a regular file")


def check_inside(files: Iterable[Path], folder: Path, location: str) -> None:
    """Refuse a file found below a directory that is a link out of it; `where` begins messages."""
    root = Path(os.path.realpath(folder))
    for file in files:
        if not _stays_inside(root, real := Path(os.path.realpath(file))):
            way = f"to read such files, name them, as {folder}/*"
            raise UsageError(f"{location}: {file} links to {real}, outside the directory; {way}")


def _stays_inside(folder: Path, real: Path) -> bool:
    """Return whether a file is below a directory, or of the same repository in a cache of the Hub.

    Its files are in `blobs` of the repository, or, by their hash, in `blobs` of the cache.
    """
    if folder in real.parents:
        return True
    above = next((each.parent for each in folder.parents if each.name == "snapshots"), Path())
    if not above.name.startswith(("models--", "datasets--")):
        return False
    is_shared = real.parent.parent == above.parent / "blobs" and _HASH.fullmatch(real.name)
    return bool(is_shared) or real.parent == above / "blobs"


def read_regular(
    path: Path, error_type: ErrorType = UsageError, *, follow_links: bool = False
) -> bytes:
    """Read a regular file of at most `MOST_BYTES`, opened by `open_regular`, or raise `refusal`."""
    with open(open_regular(path, error_type, follow_links=follow_links), "rb") as file:
        if os.fstat(file.fileno()).st_size > MAX_READ_BYTES:
            raise error_type(f"{path}: larger than the limit of {MAX_READ_BYTES >> 20:,} MiB")
        try:
            return file.read()
        except OSError as error:
            raise error_type(f"{path}: {error.strerror}") from None


def read_text_file(
    path: Path, error_type: ErrorType = UsageError, *, follow_links: bool = False
) -> str:
    """Read a UTF-8 text file with the limits and errors of `read_regular`."""
    try:
        return read_regular(path, error_type, follow_links=follow_links).decode("utf-8")
    except UnicodeDecodeError as error:
        raise error_type(f"{path}: not UTF-8: {error}") from None


def open_nofollow(path: Path, mode: str, *, folders: int = 0) -> BinaryIO:
    """Open or create a file that fsdpctl writes; OSError if it is a link or has another one.

    Its last `folders` directories must not be links either; a run directory may be one. `mode` is
    "ab", "ab+" or "wb".
    """
    access = (os.O_RDWR if "+" in mode else os.O_WRONLY) | (os.O_APPEND if "a" in mode else 0)
    *above, name = path.parts[-1 - folders :]
    descriptor = os.open(path.parents[folders], os.O_DIRECTORY)
    try:
        steps = [(each, os.O_DIRECTORY) for each in above]
        for each, flags in (*steps, (name, access | os.O_CREAT | os.O_NONBLOCK)):
            parent = descriptor
            descriptor = os.open(each, flags | os.O_NOFOLLOW, 0o666, dir_fd=parent)
            os.close(parent)
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
            raise OSError(errno.ELOOP, "not a regular file without other links", str(path))
        if "w" in mode:
            os.truncate(descriptor, 0)
        return cast(BinaryIO, open(descriptor, mode))
    except BaseException:
        os.close(descriptor)
        raise


def cache_folder(name: str) -> Path:
    """Return the directory of an entry of fsdpctl's cache, in XDG_CACHE_HOME or ~/.cache."""
    if instead := os.environ.get(_CACHE_INSTEAD):
        return Path(instead) / name
    home = os.path.expanduser("~")  # not changed for a user without one
    usual = Path(os.devnull if home == "~" else home) / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or usual) / "fsdpctl" / name


def ensure_cache(fallback: Path) -> str | None:
    """Let this process and its children use another cache if the user's cannot be written.

    Return why that is.
    """
    os.environ.pop(_CACHE_INSTEAD, None)
    usual = cache_folder("")
    try:
        usual.mkdir(parents=True, exist_ok=True)
        if os.access(usual, os.W_OK):
            return None
        why = os.strerror(errno.EACCES)
    except OSError as error:
        why = str(error.strerror)
    os.environ[_CACHE_INSTEAD] = os.path.abspath(fallback)
    return f"{usual}: {why}"


def is_same_file(path: Path, file: IO[Any]) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
    except OSError:
        return True  # a file system that does not respond has not lost it


@contextmanager
def os_errors_as(
    location: object, error_type: ErrorType = UsageError, full_disk: ErrorType | None = None
) -> Iterator[None]:
    """Raise `refusal`, which begins with `where`, in place of an OSError; `full` of a full disk."""
    try:
        yield
    except OSError as error:
        kind = full_disk if full_disk and error.errno in DISK_FULL else error_type
        raise kind(f"{location}: {error.strerror or error}") from None


def last_line(path: Path) -> str:
    """Return the last line with text of a log; empty without any."""
    with open(open_regular(path), "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
        lines = file.read(_LAST_BYTES).decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:_LONGEST]


@contextmanager
def open_atomic(path: Path, *, durable: bool = False) -> Iterator[IO[bytes]]:
    """Yield a new file that replaces `path` when the block ends without an exception.

    Other processes see the old file or the complete new one. The error of a full disk names it. If
    `durable`, the content is on the disk first, so that it survives a power loss.
    """
    scratch = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        scratch.unlink(missing_ok=True)  # of an earlier process, or a link
        with scratch.open("xb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        if error.errno in DISK_FULL:  # a failed write doesn't know its file
            error.filename = str(path)
        raise
    finally:
        scratch.unlink(missing_ok=True)


def write_atomic(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file whole, as `replacing`. Text is encoded in UTF-8."""
    with open_atomic(path, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def silenced_stderr() -> Iterator[None]:
    """Drop what this process, its libraries included, writes to standard error in the block."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
