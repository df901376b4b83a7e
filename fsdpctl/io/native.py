"""C functions of the package, which are compiled on the machine that calls them, and cached.

Operators compute the same bits; they are used where there is no compiler.
"""

import contextlib
import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from fsdpctl.io.files import cache_folder

_COMPILERS = ("gcc", "clang", "cc")
# Without contraction: a fused multiply-add rounds once, where operators round twice.
_FLAGS = (
    "-xc", "-O3", "-march=native", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math", "-fvisibility=default",
)  # fmt: skip
_SECONDS = 60.0
_LEAST = 1 << 15  # elements for which a thread is worth its start
_paths: dict[str, str] = {}


@cache
def native(source: Path, function: str, **macros: int) -> Callable[..., Any] | None:
    """Return a function of a C file, compiled with `macros`; None if that fails.

    It computes without Python's lock. Its arguments have to be of `ctypes`.
    """
    try:
        compiler = _compiler()
        found: Callable[..., Any] = getattr(_library(source, compiler, macros), function)
    except Exception as error:  # whatever a compiler does, operators compute the same
        _paths[source.stem] = f"operators; {_reason(error)}"
        return None
    _paths.setdefault(source.stem, f"compiled with {shlex.join(compiler)}")
    return found


def _reason(error: Exception) -> str:
    said = str(error)
    if isinstance(error, subprocess.SubprocessError):
        output = getattr(error, "stderr", None) or b""
        said = output.decode("utf-8", "replace").strip() or f"{error.cmd[0]} failed"  # type: ignore[attr-defined]  # both of its kinds have it
    return said.strip().rpartition("\n")[2][:200]


def native_paths() -> dict[str, str]:
    """Return how each C file that this process asked for is computed, by its name.

    If one variant of a file could not be compiled, that is what is returned.
    """
    return dict(_paths)


def in_threads(
    call: Callable[[int, int], object], count: int, threads: int, *, multiple: int = 1
) -> None:
    """Call a function with the start and the end of parts of `count` elements, in threads.

    A part begins at a `multiple`.
    """
    parts = max(1, min(threads, count // _LEAST))
    size = max(1, -(-count // parts // multiple) * multiple)
    spans = [(start, min(start + size, count)) for start in range(0, count, size)]
    if len(spans) == 1:
        call(0, count)
    else:
        list(_pool(threads).map(lambda span: call(*span), spans))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


def _compiler() -> list[str]:
    try:
        given = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise OSError(f"CC: {error}") from None
    if not given:
        given = next(([found] for each in _COMPILERS if (found := shutil.which(each))), [])
    if not given or not shutil.which(given[0]):
        raise OSError(f"no compiler: {shlex.join(given) or ', '.join(_COMPILERS)}")
    return given


def _library(source: Path, compiler: list[str], macros: dict[str, int]) -> ctypes.CDLL:
    defined = [f"-D{name}={value}" for name, value in sorted(macros.items())]
    command = [*compiler, *_FLAGS, *defined, "-shared", "-fPIC", str(source), "-lm", "-o"]
    about = f"{command}{source.read_text()}{platform.machine()}{_instructions()}"
    folder, stem = cache_folder("native"), f"{source.stem}-{_digest(about.encode())}-"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    keeps = _is_private(folder)
    for kept in folder.glob(f"{stem}*.so") if keeps else ():
        # A library that is cut off would end the process.
        if _is_private(kept) and kept.stem == stem + _digest(kept.read_bytes()):
            with contextlib.suppress(OSError):  # of another system that has the same home
                return ctypes.CDLL(str(kept))
    with tempfile.TemporaryDirectory(dir=folder if keeps else None) as scratch:
        made = Path(scratch) / "made.so"
        subprocess.run(
            [*command, str(made)],
            check=True, timeout=_SECONDS, stdin=subprocess.DEVNULL, capture_output=True,
        )  # fmt: skip
        made.chmod(0o700)
        if keeps:
            made = made.replace(folder / f"{stem}{_digest(made.read_bytes())}.so")
        return ctypes.CDLL(str(made))


def _digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def _is_private(path: Path) -> bool:
    """Return whether other users cannot have written a file or directory."""
    try:
        about = path.lstat()
    except OSError:
        return False
    return about.st_uid == os.geteuid() and not about.st_mode & 0o022


def _instructions() -> str:
    """Return the instructions that this machine's processor has: a cache may be of several."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()
