"""Files of text, and the part of them that is held out for validation."""

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from fsdpctl.config.data_files import DataFiles, data_files
from fsdpctl.config.sources import is_remote
from fsdpctl.data.hub_data import HUB, hub_files
from fsdpctl.errors import UsageError, first_of

_FILES_FOR_WHOLE_HOLDOUT = 50  # with fewer files, the end of each is held out instead
_NOT_LIBRARY = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idle_test"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Text:
    """Documents of UTF-8 text as bytes."""

    documents: tuple[bytes, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of all documents."""
        return sum(map(len, self.documents))


def is_held_out(content: bytes, fraction: float) -> bool:
    """Return whether a document is in the `fraction` that is held out for validation.

    A hash of its content decides, so more data moves no document from one part to the other.
    """
    return xxhash.xxh3_64_intdigest(content, seed=1) < int(fraction * (1 << 64))


def batches(items: Iterable[T], size: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Yield items in order, as many as have `least` together; the last ones may have less."""
    batch, total = list[T](), 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= least:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


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


def standard_library() -> Text:
    """Return the source files of Python's standard library, without its tests."""
    root, files = Path(sysconfig.get_paths()["stdlib"]), list[Path]()
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]  # not entered
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort(key=lambda file: file.parts)
    documents = tuple(content for file in files if not problem_in(content := file.read_bytes()))
    if not documents:
        raise UsageError(f"data=python_stdlib: no source files below {root}; set data=text")
    return Text(tuple(document for document in documents if document))


def hold_out(text: Text, fraction: float) -> tuple[Text, Text | None]:
    """Split text into a part to train on and a part to validate.

    With many files, some are held out whole, selected by their content. With few files, the end of
    each is held out.
    """
    if fraction == 0:
        return text, None
    if len(text.documents) >= _FILES_FOR_WHOLE_HOLDOUT:
        kept, held = _by_document(text.documents, fraction)
    else:
        halves = [_split_document(document, fraction) for document in text.documents]
        kept, held = [a for a, _ in halves if a], [b for _, b in halves if b]
    return Text(tuple(kept)), Text(tuple(held)) if held else None


def _by_document(documents: Sequence[bytes], fraction: float) -> tuple[list[bytes], list[bytes]]:
    wanted = fraction * sum(map(len, documents))
    order = sorted(
        range(len(documents)), key=lambda index: hashlib.sha256(documents[index]).digest()
    )
    held, size = set(), 0
    for index in order:
        if size + len(documents[index]) <= wanted:
            held.add(index)
            size += len(documents[index])
    return (
        [each for index, each in enumerate(documents) if index not in held],
        [each for index, each in enumerate(documents) if index in held],
    )


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
