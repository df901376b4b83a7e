"""Files of text, and the part of them that is held out for validation."""

import glob
import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdpctl.errors import UsageError, first_of

_FILES_FOR_WHOLE_HOLDOUT = 50  # with fewer files, the end of each is held out instead
_NOT_LIBRARY = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idle_test"}


@dataclass(frozen=True, slots=True)
class Text:
    """Documents of UTF-8 text as bytes, and the files that were skipped."""

    documents: tuple[bytes, ...]
    skipped: tuple[str, ...] = ()  # names, each with the reason in brackets

    @property
    def num_bytes(self) -> int:
        """The bytes of all documents."""
        return sum(map(len, self.documents))


def _problem_in(content: bytes) -> str:
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
    files = find_files(path, key)
    documents: list[bytes] = []
    skipped: list[str] = []
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise UsageError(f"{key}={path}: {file}: {error.strerror}") from None
        if problem := _problem_in(content):
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


def find_files(path: str, key: str) -> list[Path]:
    """Return a file, all files below a directory, or the files of a glob, sorted.

    Raises:
        UsageError: If there are none.
    """
    place = Path(path)
    if not path:
        raise UsageError(f"{key}: empty; expected a file, a directory or a glob")
    try:
        if place.is_file():
            return [place]
        if place.is_dir():
            return sorted(_files_below(place))
        matches = sorted(Path(name) for name in glob.glob(path, recursive=True))
        files = [each for each in matches if each.is_file()]
    except OSError as error:
        raise UsageError(f"{key}={path}: {str(error.filename)[:80]}: {error.strerror}") from None
    except RecursionError:
        raise UsageError(f"{key}={path}: directories are nested too deeply for **") from None
    if not files:
        raise UsageError(f"{key}={path}: not found; expected a file, a directory or a glob")
    return files


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
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        file
        for file in sorted(root.rglob("*.py"))
        if not _NOT_LIBRARY.intersection(file.relative_to(root).parts)
    ]
    documents = tuple(content for file in files if not _problem_in(content := file.read_bytes()))
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
