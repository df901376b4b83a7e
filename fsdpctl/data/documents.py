"""Documents of files, read piece by piece, and which of them are held out for validation.

A document is a text, or the column `text` of a row.
"""

import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import xxhash

from fsdpctl.chats.formats import COLUMN, PlainText
from fsdpctl.chats.rows import read_rows
from fsdpctl.chats.values import with_count, with_counts
from fsdpctl.config.data import CHAT
from fsdpctl.config.data_files import DataFiles
from fsdpctl.data.tokenizer import CONTEXT_CHARS, TextPiece
from fsdpctl.errors import UsageError, shorten_list
from fsdpctl.io.activity import Advance
from fsdpctl.io.files import open_regular, os_errors_as
from fsdpctl.io.untrusted import MIB

_FILES_FOR_WHOLE_HOLDOUT = 50  # with fewer files, the end of each is held out instead
_NOT_LIBRARY = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idle_test"}
PIECE_BYTES = 16 * MIB  # bytes of a text file that are tokenized at a time
_COMPRESSION_RATIO = 4  # times its size, that a compressed file is assumed to become
_COMPRESSED = (".gz", ".zst", ".parquet")


@dataclass(slots=True)
class SkippedInput:
    """The parts of the input that do not become documents."""

    files: list[str] = field(default_factory=list)  # files that aren't text
    empty_documents: int = 0  # documents
    ignored_columns: Counter[str] = field(
        default_factory=Counter
    )  # columns, with the number of rows

    def notes(self) -> tuple[str, ...]:
        """Return a line on empty documents and one on columns, if there are any."""
        empty = f"{with_count(self.empty_documents, 'document')} without text, passed over"
        columns = f"columns ignored: {with_counts(self.ignored_columns)}"
        return (empty,) * bool(self.empty_documents) + (columns,) * bool(self.ignored_columns)


def documents(
    files: DataFiles,
    key: str,
    skipped: SkippedInput,
    max_bytes: int | None = None,
    advance: Advance = lambda count: None,
) -> Iterator[TextPiece]:
    """Yield the documents of `found.train`; texts of more than `most` bytes in pieces.

    UsageError if a row has no text, or if the only file isn't text. The message names `key`.
    """
    for file in files.train:
        left = file.stat().st_size
        unfolds = _COMPRESSION_RATIO if file.name.lower().endswith(_COMPRESSED) else 1
        location = f"{key}={file}" if len(files.train) == 1 else ""
        has_rows = files.option == CHAT
        for piece in (
            _rows(file, skipped) if has_rows else _texts(file, location, skipped, max_bytes)
        ):
            done = min(left, piece.size // unfolds)
            left -= done
            advance(done)
            yield piece
        advance(left)


def read_text(files: DataFiles, key: str, path: str) -> tuple[list[bytes], SkippedInput]:
    """Read the documents of files whole, and what was passed over.

    UsageError as for `documents`, or if there is no text.
    """
    skipped = SkippedInput()
    texts = [each.text.encode() for each in documents(files, key, skipped)]
    if not texts:
        raise UsageError(f"{key}={path}: no text found{skipped_summary(skipped.files)}")
    return texts, skipped


def skipped_summary(skipped: Sequence[str]) -> str:
    """Describe which files were skipped, as the end of a sentence; empty if none were."""
    files = "file" if len(skipped) == 1 else "files"
    return f", {len(skipped)} {files} skipped: {shorten_list(skipped, 2)}" if skipped else ""


def standard_library() -> list[bytes]:
    """Return the source files of Python's standard library, without its tests."""
    root, files = Path(sysconfig.get_paths()["stdlib"]), list[Path]()
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]  # not entered
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort(key=lambda file: file.parts)
    texts = [text for file in files if (text := file.read_bytes()) and not text_problem(text)]
    if not texts:
        raise UsageError(f"data=python_stdlib: no source files below {root}; set data=text")
    return texts


def is_held_out(content: bytes, fraction: float) -> bool:
    """Return whether a document is in the `fraction` that is held out for validation.

    A hash of its content decides, so more data moves no document from one part to the other.
    """
    return xxhash.xxh3_64_intdigest(content, seed=1) < int(fraction * (1 << 64))


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
    kept = [each for index, each in enumerate(texts) if index not in held]
    return kept, [each for index, each in enumerate(texts) if index in held]


def _split_document(document: bytes, fraction: float) -> tuple[bytes, bytes]:
    """Split off the end, at a line break if one is near, never within a character."""
    cut = len(document) - int(len(document) * fraction)
    line = document.find(b"\n", cut, cut + 4096)
    if 0 <= line < len(document) - 1:
        cut = line + 1
    while cut < len(document) and document[cut] & 0xC0 == 0x80:
        cut += 1
    return document[:cut], document[cut:]


def _rows(file: Path, skipped: SkippedInput) -> Iterator[TextPiece]:
    counts = Counter[str]()
    name, lines = read_rows(str(file), counts, COLUMN)
    for line, _ in lines:
        if name != COLUMN or not isinstance(line.content, PlainText):
            kind = "a prompt with its completion" if name.startswith("prompt") else "a conversation"
            raise UsageError(f"{line.location}: {kind}; expected `text`, or set data=chat")
        skipped.ignored_columns.update(line.keys.ignored)
        yield TextPiece(line.content.text, len(line.content.text.encode()))
    skipped.empty_documents += counts["empty"]


def _texts(
    file: Path, location: str, skipped: SkippedInput, max_bytes: int | None
) -> Iterator[TextPiece]:
    """Yield the text of a file; a long one in pieces, with the text around each.

    `where` names the only file in messages; of several, those that aren't text are skipped.
    """
    with (
        os_errors_as(location or file),
        open(open_regular(file, follow_links=True), "rb") as content,
    ):
        before, now = "", None
        for part in _chunks(content, max_bytes):
            if problem := text_problem(part):
                if location or now is not None:
                    raise UsageError(f"{location or file}: {_next_step(problem)}")
                skipped.files.append(f"{file.name} ({problem})")
                return
            text = part.decode()
            if now is not None:
                yield _piece(before, now, text[:CONTEXT_CHARS], ends=False)
                before = now[-CONTEXT_CHARS:]
            now = text
        if now:
            yield _piece(before, now, "", ends=True)
        else:
            skipped.empty_documents += 1


def text_problem(content: bytes) -> str:
    """Return why `content` isn't text, empty if it is."""
    if b"\0" in content:
        return "binary"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start + 1}"
    return ""


def _piece(before: str, text: str, after: str, *, ends: bool) -> TextPiece:
    span = len(before), len(before) + len(text)
    return TextPiece(before + text + after, len(text.encode()), not before, ends, span)


def _next_step(problem: str) -> str:
    if problem == "binary":
        return "binary, expected UTF-8 text; for a token file, set data=tokens"
    return f"{problem}; convert it, for example with iconv -f latin1 -t utf-8"


def _chunks(content: IO[bytes], max_bytes: int | None) -> Iterator[bytes]:
    """Yield the bytes of a file in parts of about `most` that end after a line, or a word."""
    rest = b""
    while True:
        part = rest + content.read(-1 if max_bytes is None else max_bytes)
        if max_bytes is None or len(part) < max_bytes:
            yield part
            return
        at = _text_start(part) or last_char_start(part)
        rest = part[at:]
        yield part[:at]


def _text_start(part: bytes) -> int:
    """Return where the last line, else word, begins: not in blanks, which tokenizers may join."""
    for mark in (b"\n", b" "):
        at = len(part) - 1
        while (at := part.rfind(mark, len(part) // 2, at)) >= 0:
            if not part[at + 1 : at + 2].isspace():
                return at + 1
    return 0


def last_char_start(part: bytes) -> int:
    """Return the position of the last character, of which bytes may be missing."""
    at = len(part) - 1
    while at > len(part) - 4 and part[at] & 0xC0 == 0x80:
        at -= 1
    return at
