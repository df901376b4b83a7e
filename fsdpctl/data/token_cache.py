"""The user's cache of tokens, in a directory per entry that is named after its input.

An entry has a NumPy file per array, and a header with their checksums. It is written to a temporary
directory and then renamed. An entry that doesn't agree with its header is ignored.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fsdpctl.errors import UsageError
from fsdpctl.io.files import cache_folder
from fsdpctl.io.untrusted import read_json

_HEADER = "header.json"
_VERSION = 2
_CHUNK = 1 << 24  # elements
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """Arrays with their checksums, and other facts that are JSON."""

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
        checksums = dict(header["checksums"])
        if any(_checksum(_read(folder, each)) != known for each, known in checksums.items()):
            return None
        # Mapped again, since the check has made all pages resident.
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
    """Store an entry and return it: mapped from the cache, or as it is if it can't be written."""
    checksums = {each: _checksum(array) for each, array in arrays.items()}
    folder = cache_folder(name)
    scratch = folder.with_name(f"{name}.tmp-{os.getpid()}")
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        for each, array in arrays.items():
            with (scratch / f"{each}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        header = {"version": _VERSION, "checksums": checksums, "facts": facts}
        (scratch / _HEADER).write_text(json.dumps(header, indent=1) + "\n")
        if folder.exists() and read_cache(name) is None:  # corrupted
            shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():  # else another process was faster
            scratch.rename(folder)
    except OSError:  # without a cache, the next run only takes longer to start
        return CacheEntry(dict(arrays), checksums, dict(facts))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return read_cache(name) or CacheEntry(dict(arrays), checksums, dict(facts))


def _checksum(array: NDArray[Any]) -> str:
    digest = xxhash.xxh3_64()
    for start in range(0, len(array), _CHUNK):
        digest.update(np.ascontiguousarray(array[start : start + _CHUNK]).view(np.uint8).data)
    return digest.hexdigest()
