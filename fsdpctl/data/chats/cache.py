"""Tokens of conversations in the user's cache, by what they were made of.

A folder for each: raw little-endian arrays, and a header.json that describes them. It is written
beside its place and moved there whole; what does not agree with its header is not used.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from fsdpctl.data.chats.tokens import ChatTokens, Flags
from fsdpctl.data.tokenizer import Tokens
from fsdpctl.errors import UsageError
from fsdpctl.io.documents import MIB, as_type, read_json

PARTS = ("train", "val")
_ARRAYS = ("tokens", "trained", "starts")
_HEADER = "header.json"
_FORMAT, _VERSION = "fsdpctl-chats", 1
_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True)
class Kept:
    """All that reading conversations gave."""

    train: ChatTokens
    val: ChatTokens | None
    counts: dict[str, int]
    formats: list[str]  # of each file, those that validate behind the others
    end_tokens: list[int]


class _Array(msgspec.Struct):
    dtype: str
    length: int
    xxh3: str


class _Header(msgspec.Struct):
    format: str
    version: int
    arrays: dict[str, _Array]
    counts: dict[str, int]
    formats: list[str]
    end_tokens: list[int]


def cache_folder(name: str) -> Path:
    """Where what is called `name` is kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "fsdpctl" / f"chats-{name}"


def read_cache(folder: Path) -> Kept | None:
    """What is kept in a folder, mapped; None: nothing, or what is damaged."""
    if not (folder / _HEADER).is_file():
        return None
    try:
        content = read_json(folder / _HEADER, dict[str, Any], most_bytes=16 * MIB)
        header = as_type(content, _Header, str(folder))
        if (header.format, header.version) != (_FORMAT, _VERSION):
            return None
        parts = {name: _read_part(folder, header, name) for name in PARTS}
    except (UsageError, OSError, ValueError, KeyError, TypeError):
        return None
    if parts["train"] is None:
        return None
    return Kept(parts["train"], parts["val"], header.counts, header.formats, header.end_tokens)


def _read_part(folder: Path, header: _Header, name: str) -> ChatTokens | None:
    if f"{name}.tokens" not in header.arrays:
        return None
    arrays = [_read(folder, header, f"{name}.{each}") for each in _ARRAYS]
    checksum = "".join(header.arrays[f"{name}.{each}"].xxh3 for each in _ARRAYS)
    return ChatTokens(arrays[0], arrays[1].view(np.bool_), arrays[2], checksum)


def _read(folder: Path, header: _Header, name: str) -> Any:
    about = header.arrays[name]
    if about.dtype not in ("<u2", "<u4", "<i8", "|u1"):
        raise ValueError(about.dtype)
    found: Any
    if about.length == 0:
        found = np.zeros(0, dtype=about.dtype)
    else:
        found = np.memmap(folder / name, dtype=about.dtype, mode="r")
    if len(found) != about.length or _checksum(found) != about.xxh3:
        raise ValueError(name)
    return found


def write_cache(folder: Path, kept: Kept) -> Kept:
    """Keep it; what is given back is mapped from there, or as it was where it cannot be kept."""
    scratch = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, _Array] = {}
        for name, part in zip(PARTS, (kept.train, kept.val), strict=True):
            if part is not None:
                arrays |= _write_part(scratch, name, part)
        header = {
            "format": _FORMAT,
            "version": _VERSION,
            "arrays": {name: msgspec.to_builtins(each) for name, each in arrays.items()},
            "counts": kept.counts,
            "formats": kept.formats,
            "end_tokens": kept.end_tokens,
        }
        (scratch / _HEADER).write_text(json.dumps(header, indent=1) + "\n")
        _move(scratch, folder)
    except OSError:  # a cache that cannot be written only costs time
        return kept
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return read_cache(folder) or kept


def _move(scratch: Path, folder: Path) -> None:
    """Into place; what is damaged there goes, what another process put there meanwhile stays."""
    if folder.exists() and read_cache(folder) is None:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        scratch.rename(folder)
    except OSError:
        if not folder.exists():
            raise


def _write_part(folder: Path, name: str, part: ChatTokens) -> dict[str, _Array]:
    found = {}
    arrays = {"tokens": part.tokens, "trained": part.trained.view(np.uint8), "starts": part.starts}
    for each, array in arrays.items():
        data = np.ascontiguousarray(array)
        with (folder / f"{name}.{each}").open("wb") as file:
            file.write(data.data)
            file.flush()
            os.fsync(file.fileno())
        about = _Array(data.dtype.newbyteorder("<").str, len(data), _checksum(data))
        found[f"{name}.{each}"] = about
    return found


def _checksum(array: Any) -> str:
    digest = xxhash.xxh3_64()
    for start in range(0, len(array), _AT_ONCE):
        digest.update(np.ascontiguousarray(array[start : start + _AT_ONCE]).data)
    return digest.hexdigest()


def part_of(tokens: Tokens, trained: Flags, starts: NDArray[np.int64]) -> ChatTokens:
    """A part of the data, with the checksum that it has when it is kept."""
    arrays = (tokens, trained.view(np.uint8), starts)
    return ChatTokens(tokens, trained, starts, "".join(map(_checksum, arrays)))
