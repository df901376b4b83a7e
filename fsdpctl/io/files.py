"""Files that may be untrusted: opened safely, read up to a limit, and written atomically."""

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

_MAX_NAMED_RUNS = 5
ErrorType = type[FsdpctlError]
MAX_READ_BYTES = 1 << 30  # size of a file or a line that is read into memory
# Bytes of a log's end that are searched for its last line, and characters of that line.
_LAST_BYTES, _MAX_LINE = 4096, 300
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
_CACHE_VARIABLE = "FSDPCTL_CACHE"  # tells child processes the fallback of `ensure_cache`
_HASH = re.compile(r"[0-9a-f]{64}")


def checked_name(name: object, pattern: str, location: str, error_type: ErrorType) -> str:
    """Return `name` if it is a plain file name that matches `pattern`, else raise `error_type`."""
    if isinstance(name, str) and _PLAIN.fullmatch(name) and re.fullmatch(pattern, name):
        return name
    raise error_type(f"{location}: {str(name)[:80]!r} is not a valid file name here")


def nearest_path_hint(path: str) -> str:
    """Return `; did you mean X?` for the existing path with the most similar name, or ""."""
    above, name = os.path.split(path)
    try:
        hint = did_you_mean(name, sorted(each for each in os.listdir(above or ".") if each != name))
    except OSError:
        return ""
    return hint.replace("mean ", f"mean {above.rstrip('/')}/", 1) if above else hint


def _runs_by_start(folder: Path) -> list[Path]:
    configs = [each for each in folder.glob(f"*/{RUN_CONFIG}") if each.parent.name != LATEST]
    return [each.parent for each in sorted(configs, key=os.path.getmtime)]


def latest_run(folder: Path) -> Path | None:
    """Return the run that the link `latest` names; without the link, the run that began last."""
    if (link := folder / LATEST).is_symlink() and link.is_dir():
        return folder / Path(os.path.realpath(link)).name
    return next(reversed(_runs_by_start(folder)), None)


def newest_runs_hint(folder: Path) -> str:
    """Return `, such as` and the newest run directories in `folder`, or ""."""
    runs = sorted(map(str, _runs_by_start(folder)[-_MAX_NAMED_RUNS:]))
    return f", such as {', '.join(runs)}" if runs else ""


def nearest_run_hint(run: Path) -> str:
    """Return a hint at the path most similar to `run`, or else at the newest runs next to it."""
    newest = newest_runs_hint(run.parent)
    return nearest_path_hint(str(run)) or (f"; expected a run{newest}" if newest else "")


def open_regular(
    path: Path, error_type: ErrorType = UsageError, *, follow_links: bool = False
) -> int:
    """Open a regular file and return its descriptor, or raise `error_type`.

    A named pipe is rejected without blocking. A symbolic link must stay in the file's directory, or
    lead from a snapshot in the cache of huggingface_hub to its repository. With `follow_links`, for
    a path that the user typed, it may lead anywhere.
    """
    with os_errors_as(path, error_type):
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
    raise error_type(f"{path}: not a regular file")


def check_inside(files: Iterable[Path], folder: Path, location: str) -> None:
    """Raise a UsageError, at `location`, if a file below `folder` is a link out of `folder`."""
    root = Path(os.path.realpath(folder))
    for file in files:
        if not _stays_inside(root, real := Path(os.path.realpath(file))):
            problem = f"{file} links to {real}, outside the directory"
            raise UsageError(f"{location}: {problem}; pass {folder}/* to read linked files")


def _stays_inside(folder: Path, real: Path) -> bool:
    """Return whether a file is below a directory, or in the same repository of the Hub's cache.

    A repository's files are in its `blobs`, or, by their hash, in `blobs` of the cache.
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
    """Read a file of at most MAX_READ_BYTES, opened by `open_regular`, or raise `error_type`."""
    with open(open_regular(path, error_type, follow_links=follow_links), "rb") as file:
        if os.fstat(file.fileno()).st_size > MAX_READ_BYTES:
            raise error_type(f"{path}: larger than the limit of {MAX_READ_BYTES >> 20:,} MiB")
        with os_errors_as(path, error_type):
            content = file.read()
    return content


def read_text_file(
    path: Path, error_type: ErrorType = UsageError, *, follow_links: bool = False
) -> str:
    """Read a UTF-8 text file with the limits and errors of `read_regular`."""
    try:
        return read_regular(path, error_type, follow_links=follow_links).decode("utf-8")
    except UnicodeDecodeError as error:
        raise error_type(f"{path}: not UTF-8: {error}") from None


def open_nofollow(path: Path, mode: str, *, num_folders: int = 0) -> BinaryIO:
    """Open or create a file without following links; `mode` is "ab", "ab+" or "wb".

    OSError if the file is a symbolic link or has another hard link, or if one of its `num_folders`
    nearest parents is a link.
    """
    access = (os.O_RDWR if "+" in mode else os.O_WRONLY) | (os.O_APPEND if "a" in mode else 0)
    *above, name = path.parts[-1 - num_folders :]
    descriptor = os.open(path.parents[num_folders], os.O_DIRECTORY)
    try:
        steps = [(each, os.O_DIRECTORY) for each in above]
        # Opened one by one, because O_NOFOLLOW checks only the last component of a path.
        for each, flags in (*steps, (name, access | os.O_CREAT | os.O_NONBLOCK)):
            parent = descriptor
            descriptor = os.open(each, flags | os.O_NOFOLLOW, 0o666, dir_fd=parent)
            os.close(parent)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise OSError(errno.ELOOP, "not a regular file, or has another hard link", str(path))
        if "w" in mode:
            os.truncate(descriptor, 0)
        return cast(BinaryIO, open(descriptor, mode))
    except BaseException:
        os.close(descriptor)
        raise


def cache_folder(name: str) -> Path:
    """Return the directory of an entry of fsdpctl's cache, in XDG_CACHE_HOME or ~/.cache."""
    if fallback := os.environ.get(_CACHE_VARIABLE):
        return Path(fallback) / name
    home = os.path.expanduser("~")  # "~" for a user without a home directory
    default = Path(os.devnull if home == "~" else home) / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or default) / "fsdpctl" / name


def ensure_cache(fallback: Path) -> str | None:
    """Use `fallback`, also in children, if the user's cache can't be written; return the reason."""
    os.environ.pop(_CACHE_VARIABLE, None)
    user_cache = cache_folder("")
    try:
        user_cache.mkdir(parents=True, exist_ok=True)
        if os.access(user_cache, os.W_OK):
            return None
        reason = os.strerror(errno.EACCES)
    except OSError as error:
        reason = str(error.strerror)
    os.environ[_CACHE_VARIABLE] = os.path.abspath(fallback)
    return f"{user_cache}: {reason}"


def is_same_file(path: Path, file: IO[Any]) -> bool:
    """Return whether `path` still names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
    except OSError:
        return True  # a file system that doesn't respond has not lost the file


@contextmanager
def os_errors_as(
    location: object, error_type: ErrorType = UsageError, full_disk: ErrorType | None = None
) -> Iterator[None]:
    """Convert an OSError in the block to `error_type`, or of a full disk to `full_disk`."""
    try:
        yield
    except OSError as error:
        kind = full_disk if full_disk and error.errno in DISK_FULL else error_type
        raise kind(f"{location}: {error.strerror or error}") from None


def last_line(path: Path) -> str:
    """Return the last nonempty line of a log, or ""."""
    with open(open_regular(path), "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
        lines = file.read(_LAST_BYTES).decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:_MAX_LINE]


@contextmanager
def open_atomic(path: Path, *, durable: bool = False) -> Iterator[IO[bytes]]:
    """Yield a new file that replaces `path` when the block ends without an exception.

    Other processes see the old file or the complete new file. If `durable`, the content is written
    to the disk first, so that it survives a power loss.
    """
    scratch = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        scratch.unlink(missing_ok=True)  # an earlier process may have left it, or it is a link
        with scratch.open("xb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        if error.errno in DISK_FULL:
            error.filename = str(path)  # the error of a write doesn't name its file
        raise
    finally:
        scratch.unlink(missing_ok=True)


def write_atomic(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file as `open_atomic` does. Text is encoded in UTF-8."""
    with open_atomic(path, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def silenced_stderr() -> Iterator[None]:
    """Discard what all threads of this process write to standard error during the block."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
