"""Files of text, and the part of them that is held out for validation."""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdpctl.config.sources import is_remote
from fsdpctl.data.hub_data import HUB, hub_files
from fsdpctl.errors import UsageError, first_of
from fsdpctl.io.files import nearest_path

_FILES_FOR_WHOLE_HOLDOUT = 50  # with fewer files, the end of each is held out instead
_NOT_LIBRARY = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idle_test"}

# Suffixes of files of other formats than text, whatever their bytes, and the next step.
_NO_TEXT = {
    "pdf": "a PDF; convert it, for example with pdftotext",
    "docx doc odt epub": "a document; convert it with pandoc",
    "zip tar gz tgz bz2 xz zst 7z": "compressed; unpack it",
    "png jpg jpeg gif webp mp3 wav mp4": "an image or a recording; expected text",
    "xlsx xls parquet arrow": "a table; set data=chat with .jsonl or .parquet",
    "safetensors gguf pt pth": "model weights; to start from them, set model=hf model.path=DIR",
}


@dataclass(frozen=True, slots=True)
class Text:
    """Documents of UTF-8 text as bytes, and the files that were skipped."""

    documents: tuple[bytes, ...]
    skipped: tuple[str, ...] = ()  # names, each with the reason in brackets

    @property
    def num_bytes(self) -> int:
        """The bytes of all documents."""
        return sum(map(len, self.documents))


def problem_in(content: bytes) -> str:
    """Return why `content` isn't text, empty if it is."""
    if b"\0" in content:
        return "binary"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start + 1}"
    return ""


def read_text(path: str, key: str = "data.path") -> Text:
    """Read the text of a file, of all files below a directory, or of the files of a glob.

    Raises:
        UsageError: If no file is found, if a single file isn't text, or if there is no text.
    """
    files = text_files(path, key)
    documents: list[bytes] = []
    skipped: list[str] = []
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise UsageError(f"{key}={path}: {file}: {error.strerror}") from None
        if problem := problem_in(content):
            if len(files) == 1:
                raise UsageError(f"{key}={file}: {_next_step(problem)}")
            skipped.append(f"{file.name} ({problem})")
        elif content:
            documents.append(content)
    if not documents:
        raise UsageError(f"{key}={path}: no text found{left_out(skipped)}")
    return Text(tuple(documents), tuple(skipped))


def _next_step(problem: str) -> str:
    if problem == "binary":
        return "binary, expected UTF-8 text; for a token file, set data=tokens"
    return f"{problem}; convert it, for example with iconv -f latin1 -t utf-8"


def text_files(path: str, key: str) -> list[Path]:
    """Return the files of `find_files`; a single one has no suffix of another format than text."""
    files = find_files(path, key)
    suffix = files[0].suffix.lower()[1:] if len(files) == 1 else ""
    for kind in (kind for suffixes, kind in _NO_TEXT.items() if suffix in suffixes.split()):
        raise UsageError(f"{key}={path}: {kind}")
    return files


def find_files(path: str, key: str) -> list[Path]:
    """Return a file, all files below a directory, or the files of a glob, sorted.

    Raises:
        UsageError: If there are none.
    """
    place = Path(path)
    if path.startswith(HUB):
        return hub_files(path, key)
    if is_remote(path, f"{key}={path}"):
        raise UsageError(f"{key}={path}: only data=tokens reads from object stores")
    if not path:
        raise UsageError(f"{key}: empty; expected a file, a directory or a glob")
    try:
        if place.is_file():
            return [place]
        if place.is_dir():
            return sorted(_files_below(place), key=_parts)
        matches = sorted(map(Path, glob.glob(path, recursive=True)), key=_parts)
        files = [each for each in matches if each.is_file()]
    except OSError as error:
        raise UsageError(f"{key}={path}: {str(error.filename)[:80]}: {error.strerror}") from None
    except RecursionError:
        raise UsageError(f"{key}={path}: directories are nested too deeply for **") from None
    if not files:
        if place.exists():
            raise UsageError(f"{key}={path}: not a regular file; expected a file or a directory")
        hint = nearest_path(path) or "; expected a file, a directory or a glob"
        raise UsageError(f"{key}={path}: not found{hint}")
    return files


def _parts(path: Path) -> tuple[str, ...]:
    """Return the key by which paths are sorted; comparing paths is slower."""
    return path.parts


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield all files, except hidden ones and those of runs, which may change while read."""
    folders = [folder]
    while folders:
        entries = [each for each in folders.pop().iterdir() if not each.name.startswith(".")]
        if {"config.yaml", "overrides.txt"} <= {each.name for each in entries}:
            continue
        folders += [each for each in entries if each.is_dir() and not each.is_symlink()]
        yield from (each for each in entries if each.is_file())


def standard_library() -> Text:
    """Return the source files of Python's standard library, without its tests."""
    root, files = Path(sysconfig.get_paths()["stdlib"]), list[Path]()
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]  # not entered
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort(key=_parts)
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
    return Text(tuple(kept), text.skipped), Text(tuple(held)) if held else None


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


def iter_documents(text: Text) -> Iterator[str]:
    """Return the documents as strings."""
    return (document.decode("utf-8") for document in text.documents)
