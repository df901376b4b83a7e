"""Files of data, and the part of them that is held out for validation."""

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import xxhash

from fsdpctl.config.data_files import DataFiles, data_files
from fsdpctl.config.sources import is_remote
from fsdpctl.data.hub_data import HUB, hub_files
from fsdpctl.errors import UsageError, first_of

_FILES_FOR_WHOLE_HOLDOUT = 50  # with fewer files, the end of each is held out instead
_NOT_LIBRARY = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idle_test"}


def is_held_out(content: bytes, fraction: float) -> bool:
    """Return whether a document is in the `fraction` that is held out for validation.

    A hash of its content decides, so more data moves no document from one part to the other.
    """
    return xxhash.xxh3_64_intdigest(content, seed=1) < int(fraction * (1 << 64))


def problem_in(content: bytes) -> str:
    """Return why `content` isn't text, empty if it is."""
    if b"\0" in content:
        return "binary"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start + 1}"
    return ""


def find_data(path: str, key: str = "data.path", option: str | None = None) -> DataFiles:
    """Return the files of `data_files`, or of a data set in the cache of the Hugging Face Hub."""
    if path.startswith(HUB):
        return hub_files(path, key, option)
    if is_remote(path, f"{key}={path}"):
        raise UsageError(f"{key}={path}: only data=tokens reads from object stores")
    return data_files(path, key, option)


def standard_library() -> list[bytes]:
    """Return the source files of Python's standard library, without its tests."""
    root, files = Path(sysconfig.get_paths()["stdlib"]), list[Path]()
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]  # not entered
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort(key=lambda file: file.parts)
    texts = [text for file in files if (text := file.read_bytes()) and not problem_in(text)]
    if not texts:
        raise UsageError(f"data=python_stdlib: no source files below {root}; set data=text")
    return texts


def hold_out(texts: Sequence[bytes], fraction: float) -> tuple[list[bytes], list[bytes]]:
    """Split texts into those to train on and those to validate on.

    Of many, some are held out whole, in the order of their hashes, so that their sizes add up to
    the fraction. Of few, the end of each is held out.
    """
    if not fraction:
        return [*texts], []
    if len(texts) < _FILES_FOR_WHOLE_HOLDOUT:
        parts = [_split_document(each, fraction) for each in texts]
        return [a for a, _ in parts if a], [b for _, b in parts if b]
    held, left = set[int](), fraction * sum(map(len, texts))
    for index in sorted(range(len(texts)), key=lambda each: hashlib.sha256(texts[each]).digest()):
        if len(texts[index]) <= left:
            held.add(index)
            left -= len(texts[index])
    is_held = [index in held for index in range(len(texts))]
    kept = [each for each, held_out in zip(texts, is_held, strict=True) if not held_out]
    return kept, [each for each, held_out in zip(texts, is_held, strict=True) if held_out]


def _split_document(document: bytes, fraction: float) -> tuple[bytes, bytes]:
    """Split off the end, at a line break if one is near, never within a character."""
    cut = len(document) - int(len(document) * fraction)
    line = document.find(b"\n", cut, cut + 4096)
    if 0 <= line < len(document) - 1:
        cut = line + 1
    while cut < len(document) and document[cut] & 0xC0 == 0x80:
        cut += 1
    return document[:cut], document[cut:]


def left_out(skipped: Sequence[str]) -> str:
    """Describe which files were skipped, as the end of a sentence; empty if none were."""
    files = "file" if len(skipped) == 1 else "files"
    return f", {len(skipped)} {files} skipped: {first_of(skipped, 2)}" if skipped else ""
