"""The user's cache of tokens: a directory per entry, named after a hash of the entry's input.

An entry has a NumPy file per array, and a header with their checksums. It is written to a temporary
directory, which is then renamed. An entry whose arrays differ from its header is ignored. Arrays
whose files still have their original sizes and times are not verified: otherwise each rank would
read all of them at each start.
"""

import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fsdpctl.data.token_reads import file_stamp
from fsdpctl.errors import UsageError
from fsdpctl.io.files import cache_folder
from fsdpctl.io.untrusted import read_json

_HEADER = "header.json"
_VERSION = 3
_CHUNK = 1 << 24  # elements
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """Arrays with their checksums, and further facts as JSON."""

    arrays: Arrays
    checksums: dict[str, str]
    facts: dict[str, Any]


def read_cache(name: str) -> CacheEntry | None:
    """Return an entry with memory-mapped arrays, or None if it is missing or corrupted."""
    folder = cache_folder(name)
    if not (folder / _HEADER).is_file():
        return None
    try:
        header = read_json(folder / _HEADER, dict[str, Any])
        if header["version"] != _VERSION:
            return None
        checksums, states = dict(header["checksums"]), header["states"]
        changed = [each for each in checksums if _stamp(folder, each) != states[each]]
        if any(_checksum(_read(folder, each)) != checksums[each] for each in changed):
            return None
        # The arrays are mapped again, because verifying them has made all pages resident.
        arrays = {each: _read(folder, each) for each in checksums}
        return CacheEntry(arrays, checksums, header["facts"])
    except (UsageError, OSError, ValueError, KeyError, TypeError):
        return None


def _read(folder: Path, name: str) -> NDArray[Any]:
    if Path(name).name != name:
        raise ValueError(name)
    array: NDArray[Any] = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
    return array


def write_cache(name: str, arrays: Arrays, facts: Mapping[str, Any]) -> CacheEntry:
    """Store an entry. Return it mapped from the cache, or unchanged if it can't be written."""
    checksums = {each: _checksum(array) for each, array in arrays.items()}
    folder = cache_folder(name)
    scratch, second = folder.with_name(f"{name}.tmp-{os.getpid()}"), int(time.time())
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        for each, array in arrays.items():
            with (scratch / f"{each}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            # The time is a whole second, so that any later write changes it, however soon.
            os.utime(scratch / f"{each}.npy", (second, second))
        states = {each: _stamp(scratch, each) for each in arrays}
        header = {"version": _VERSION, "checksums": checksums, "states": states, "facts": facts}
        (scratch / _HEADER).write_text(json.dumps(header, indent=1) + "\n")
        if folder.exists() and read_cache(name) is None:  # corrupted
            shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():  # another process may have been faster
            scratch.rename(folder)
    except OSError:  # without a cache, the next run only takes longer to start
        return CacheEntry(dict(arrays), checksums, dict(facts))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return read_cache(name) or CacheEntry(dict(arrays), checksums, dict(facts))


def entry_name(kind: str, about: object, files: Iterable[Path]) -> str:
    """Return the name of an entry for files, from their paths, sizes and times."""
    states = [(str(each.absolute()), each.stat()) for each in files]
    file_states = [(path, x.st_size, x.st_mtime_ns, x.st_ctime_ns) for path, x in states]
    text = repr((about, file_states)).encode(errors="surrogateescape")
    return f"{kind}-{xxhash.xxh3_128_hexdigest(text)}"


def _stamp(folder: Path, name: str) -> list[int]:
    return [*file_stamp((folder / f"{name}.npy").stat())]


def _checksum(array: NDArray[Any]) -> str:
    digest = xxhash.xxh3_64()
    for start in range(0, len(array), _CHUNK):
        digest.update(np.ascontiguousarray(array[start : start + _CHUNK]).view(np.uint8).data)
    return digest.hexdigest()
