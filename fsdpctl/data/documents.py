"""Documents of text files or rows, read piece by piece, and the validation documents among them.

A document is a text file, or the column `text` of a row.
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

from fsdpctl.chats.formats import TEXT_COLUMN, PlainText
from fsdpctl.chats.rows import read_rows
from fsdpctl.chats.values import count_of, list_counts
from fsdpctl.config.data import CHAT
from fsdpctl.config.data_files import DataFiles
from fsdpctl.data.tokenizer import CONTEXT_CHARS, TextPiece
from fsdpctl.errors import UsageError, shorten_list
from fsdpctl.io.activity import Advance
from fsdpctl.io.files import open_regular, os_errors_as
from fsdpctl.io.texts import MIB

_MIN_TEXTS_FOR_WHOLE_HOLDOUT = 50  # below this number, the end of each text is held out
_NOT_LIBRARY = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idle_test"}
PIECE_BYTES = 16 * MIB  # bytes of a text file that are tokenized at a time
_COMPRESSION_RATIO = 4  # assumed, to show progress in bytes of a compressed file
_COMPRESSED = (".gz", ".zst", ".parquet")


@dataclass(slots=True)
class SkippedInput:
    """Input that was skipped."""

    files: list[str] = field(default_factory=list)  # files that aren't text
    empty_documents: int = 0
    ignored_columns: Counter[str] = field(default_factory=Counter)  # with numbers of rows

    def notes(self) -> tuple[str, ...]:
        """Return a line about empty documents and a line about ignored columns, if any."""
        empty = f"{count_of(self.empty_documents, 'document')} without text, skipped"
        columns = f"columns ignored: {list_counts(self.ignored_columns)}"
        return (empty,) * bool(self.empty_documents) + (columns,) * bool(self.ignored_columns)


def documents(
    files: DataFiles,
    key: str,
    skipped: SkippedInput,
    max_bytes: int | None = None,
    advance: Advance = lambda count: None,
) -> Iterator[TextPiece]:
    """Yield the documents of `files.train`; texts of more than `max_bytes` in pieces.

    `advance` receives the bytes of the files as they are read. UsageError, which names the setting
    `key`, if a row has no text, or if the only file isn't text.
    """
    for file in files.files:
        left = file.stat().st_size
        ratio = _COMPRESSION_RATIO if file.name.lower().endswith(_COMPRESSED) else 1
        location = f"{key}={file}" if len(files.files) == 1 else ""
        texts = _texts(file, location, skipped, max_bytes)
        for piece in _rows(file, skipped) if files.kind == CHAT else texts:
            done = min(left, piece.size // ratio)
            left -= done
            advance(done)
            yield piece
        advance(left)


def read_text(files: DataFiles, key: str, path: str) -> tuple[list[bytes], SkippedInput]:
    """Read all documents of files; return them with the input that was skipped.

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
        # os.walk enters only the directories that are left in this list.
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort(key=lambda file: file.parts)
    texts = [text for file in files if (text := file.read_bytes()) and not text_problem(text)]
    if not texts:
        raise UsageError(f"data=python_stdlib: no source files below {root}; set data=text")
    return texts


def is_held_out(content: bytes, fraction: float) -> bool:
    """Return whether a document is in the `fraction` that is held out for validation.

    A hash of the content decides, so adding data moves no document between the two parts.
    """
    return xxhash.xxh3_64_intdigest(content, seed=1) < int(fraction * (1 << 64))


def hold_out(texts: Sequence[bytes], fraction: float) -> tuple[list[bytes], list[bytes]]:
    """Split texts into texts to train on and texts to validate on.

    Of at least 50 texts, whole texts are held out in the order of their hashes, until their sizes
    add up to the fraction. Of fewer texts, the end of each is held out.
    """
    if not fraction:
        return [*texts], []
    if len(texts) < _MIN_TEXTS_FOR_WHOLE_HOLDOUT:
        parts = [_split_document(each, fraction) for each in texts]
        return [a for a, _ in parts if a], [b for _, b in parts if b]
    held_out, left = set[int](), fraction * sum(map(len, texts))
    for index in sorted(range(len(texts)), key=lambda each: hashlib.sha256(texts[each]).digest()):
        if len(texts[index]) <= left:
            held_out.add(index)
            left -= len(texts[index])
    train = [each for index, each in enumerate(texts) if index not in held_out]
    return train, [each for index, each in enumerate(texts) if index in held_out]


def _split_document(document: bytes, fraction: float) -> tuple[bytes, bytes]:
    """Split off the end of a document, at a line break if possible, never within a character."""
    cut = len(document) - int(len(document) * fraction)
    line = document.find(b"\n", cut, cut + 4096)
    if 0 <= line < len(document) - 1:
        cut = line + 1
    while cut < len(document) and document[cut] & 0xC0 == 0x80:
        cut += 1
    return document[:cut], document[cut:]


def _rows(file: Path, skipped: SkippedInput) -> Iterator[TextPiece]:
    counts = Counter[str]()
    name, rows = read_rows(str(file), counts, TEXT_COLUMN)
    for row, _ in rows:
        if name != TEXT_COLUMN or not isinstance(row.content, PlainText):
            kind = "a prompt with its completion" if name.startswith("prompt") else "a conversation"
            raise UsageError(f"{row.location}: {kind}; expected `text`, or set data=chat")
        skipped.ignored_columns.update(row.keys.ignored)
        yield TextPiece(row.content.text, len(row.content.text.encode()))
    skipped.empty_documents += counts["empty"]


def _texts(
    file: Path, location: str, skipped: SkippedInput, max_bytes: int | None
) -> Iterator[TextPiece]:
    """Yield the text of a file; a long text in pieces, each with the text around it.

    `location` names the only file in messages. It is empty if there are several files: then a file
    that isn't text is skipped.
    """
    errors = os_errors_as(location or file)
    with errors, open(open_regular(file, follow_links=True), "rb") as content:
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
    span, size = (len(before), len(before) + len(text)), len(text.encode())
    return TextPiece(before + text + after, size, begins=not before, ends=ends, span=span)


def _next_step(problem: str) -> str:
    if problem == "binary":
        return "binary, expected UTF-8 text; for a token file, set data=tokens"
    return f"{problem}; convert it, for example with iconv -f latin1 -t utf-8"


def _chunks(content: IO[bytes], max_bytes: int | None) -> Iterator[bytes]:
    """Yield the bytes of a file in chunks of about `max_bytes` that end after a line or a word."""
    rest = b""
    while True:
        chunk = rest + content.read(-1 if max_bytes is None else max_bytes)
        if max_bytes is None or len(chunk) < max_bytes:
            yield chunk
            return
        cut = _text_start(chunk) or last_char_start(chunk)
        rest = chunk[cut:]
        yield chunk[:cut]


def _text_start(part: bytes) -> int:
    """Return the start of the last line, or else word; 0 if the second half has neither.

    It is never within whitespace, which tokenizers may join to one token.
    """
    for mark in (b"\n", b" "):
        start = len(part) - 1
        while (start := part.rfind(mark, len(part) // 2, start)) >= 0:
            if not part[start + 1 : start + 2].isspace():
                return start + 1
    return 0


def last_char_start(part: bytes) -> int:
    """Return the position of the last character, which may be incomplete."""
    start = len(part) - 1
    while start > len(part) - 4 and part[start] & 0xC0 == 0x80:
        start -= 1
    return start
