"""Converts text of any size to token files: it is read, tokenized and written piece by piece.

Note: a state file next to the token files records the complete token files, after which a killed
run continues. The output depends on the input alone: documents are read in a fixed order, and the
tokenizer's threads share only the work within a batch.
"""

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import chain, islice, pairwise
from pathlib import Path

import numpy as np
import xxhash

from fsdpctl.config.data_files import TOKENIZE, DataFiles
from fsdpctl.data.documents import PIECE_BYTES, SkippedInput, documents, skipped_summary
from fsdpctl.data.find_data import find_data
from fsdpctl.data.token_formats import TOKEN_FILE_FORMAT
from fsdpctl.data.tokenizer import BATCH_BYTES, TextPiece, Tokenizer, Tokens
from fsdpctl.errors import UsageError
from fsdpctl.io import files
from fsdpctl.io.activity import BYTES, doing
from fsdpctl.io.files import open_nofollow, os_errors_as
from fsdpctl.io.texts import batch_by_size
from fsdpctl.io.untrusted import read_json

_PIECES_VERSION = "3"  # in the state's checksum; increase it if the same files give other pieces


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """The files to write."""

    path: Path  # NAME.bin; with `shard_tokens`, the files are NAME-00000.bin and so on
    shard_tokens: int | None = None  # tokens per file; the last file may have fewer

    def file(self, number: int) -> Path:
        if self.shard_tokens is None:
            return self.path
        return self.path.with_name(f"{self.path.stem}-{number:05d}.bin")

    def contains(self, file: Path) -> bool:
        """Return whether `file` is an output file, which may be in the directory of the input."""
        is_here = os.path.realpath(file.parent) == os.path.realpath(self.path.parent)
        name = re.escape(self.path.stem)
        names = rf"{name}(?:-\d{{5}})?\.(?:bin|json|part|progress\.json)"
        return is_here and re.fullmatch(names, file.name) is not None

    @property
    def part(self) -> Path:
        return self.path.with_name(f"{self.path.stem}.part")

    @property
    def state(self) -> Path:
        return self.path.with_name(f"{self.path.stem}.progress.json")


@dataclass(frozen=True, slots=True)
class TokenizeResult:
    """The numbers of files, tokens and bytes of text that were written."""

    files: int
    tokens: int
    num_bytes: int
    summary: str  # describes the files that were read
    notes: tuple[str, ...]  # about skipped input


@dataclass(slots=True)
class _State:
    """How much of the input is in the complete files; stored as JSON."""

    about: str  # the checksum of the input and the settings
    pieces: int = 0  # pieces of text whose tokens are all written
    more: int = 0  # written tokens of the next batch
    files: int = 0
    total: int = 0  # tokens
    num_bytes: int = 0  # bytes of text


def tokenize_files(
    source: str, output: TokenOutput, tokenizer: Tokenizer, *, overwrite: bool = False
) -> TokenizeResult:
    """Tokenize text files, or the column `text` of JSON Lines, Parquet and Arrow files.

    If a run with the same input and settings was killed, this run continues after its last complete
    file. UsageError if there is no text, if a row has no text, or if a file can't be written.
    """
    data_files = find_data(source, "SRC", TOKENIZE)
    train = tuple(each for each in data_files.files if not output.contains(each))
    data_files = DataFiles(data_files.kind, train, data_files.validation, data_files.left_out)
    skipped = SkippedInput()
    stored = read_json(output.state, _State) if output.state.exists() else None
    checksum = _input_checksum(data_files, output, tokenizer)
    state = stored if stored and stored.about == checksum else _State(checksum)
    existing = _existing(output)
    if existing and not (overwrite or state is stored):
        raise UsageError(f"{existing[0]}: already exists; pass --overwrite to replace it")
    with os_errors_as(output.path), closing(_Writer(output, tokenizer, state)) as writer:
        size = sum(each.stat().st_size for each in data_files.files)
        with doing("tokenizing", BYTES, size) as advance:
            max_bytes = PIECE_BYTES if tokenizer.splits_text else None
            pieces = documents(data_files, "SRC", skipped, max_bytes, advance)
            for batch, tokens in _encoded(islice(pieces, state.pieces, None), tokenizer):
                writer.write(batch, tokens)
        if not state.total:
            raise UsageError(f"SRC={source}: no text found")
        writer.finish()
    last = output.file(state.files - 1).stem
    for stale in existing if output.shard_tokens is not None else ():
        if stale.stem > last:
            stale.unlink()
    summary = data_files.summary(validates=False, skipped=len(skipped.files))
    summary += skipped_summary(skipped.files)
    return TokenizeResult(state.files, state.total, state.num_bytes, summary, skipped.notes())


def _input_checksum(data_files: DataFiles, output: TokenOutput, tokenizer: Tokenizer) -> str:
    parts = [_PIECES_VERSION, tokenizer.checksum, repr(output.shard_tokens)]
    for file in data_files.files:
        status = file.stat()
        parts.append(f"{file} {status.st_size} {status.st_mtime_ns}")
    return xxhash.xxh3_128_hexdigest("\n".join(parts).encode("utf-8", "surrogateescape"))


def _existing(output: TokenOutput) -> list[Path]:
    if output.shard_tokens is None:
        return [each for each in (output.path, output.path.with_suffix(".json")) if each.exists()]
    name = f"{glob.escape(output.path.stem)}-[0-9][0-9][0-9][0-9][0-9]"
    return sorted(x for end in ("bin", "json") for x in output.path.parent.glob(f"{name}.{end}"))


def _encoded(
    pieces: Iterable[TextPiece], tokenizer: Tokenizer
) -> Iterator[tuple[list[TextPiece], Tokens]]:
    with ThreadPoolExecutor(1) as pool:
        batches = batch_by_size(pieces, lambda piece: piece.size, BATCH_BYTES)
        futures = ((each, pool.submit(tokenizer.encode_pieces, each)) for each in batches)
        # `pairwise` submits the next batch before this one is yielded.
        for (batch, tokens), _ in pairwise(chain(futures, [([], Future[Tokens]())])):
            yield batch, tokens.result()


class _Writer:
    """Writes tokens to files of `shard_tokens` tokens, and the state after each file."""

    def __init__(self, output: TokenOutput, tokenizer: Tokenizer, state: _State) -> None:
        self._state, self._output, self._tokenizer = state, output, tokenizer
        self._dtype = np.dtype(tokenizer.dtype).newbyteorder("<")
        self._begin()

    def _begin(self) -> None:
        self._file, self._digest = open_nofollow(self._output.part, "wb"), xxhash.xxh3_64()
        self._count = 0  # tokens in the file

    def write(self, batch: list[TextPiece], tokens: Tokens) -> None:
        state, max_tokens = self._state, self._output.shard_tokens
        values = np.ascontiguousarray(tokens, dtype=self._dtype)
        while state.more < len(values):
            end = len(values) if max_tokens is None else state.more + max_tokens - self._count
            chunk = values[state.more : end]
            self._file.write(chunk.data)
            self._digest.update(chunk.data)
            self._count += len(chunk)
            state.total += len(chunk)
            state.more += len(chunk)
            if self._count == max_tokens:
                self._complete()
        state.pieces += len(batch)
        state.more = 0
        state.num_bytes += sum(each.size for each in batch)

    def close(self) -> None:
        """Close the incomplete file; a later run writes it again."""
        self._file.close()

    def finish(self) -> None:
        """Complete the last file, and remove the state."""
        if self._count:
            self._complete()
        self._file.close()
        self._output.part.unlink(missing_ok=True)
        self._output.state.unlink(missing_ok=True)

    def _save(self, state: _State) -> None:
        files.write_atomic(self._output.state, json.dumps(asdict(state)) + "\n", durable=True)

    def _complete(self) -> None:
        path = self._output.file(self._state.files)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if not self._state.files:
            # The state marks this file as ours, so that a later run may replace it.
            self._save(_State(self._state.about))
        # A header of earlier tokens must never be next to the new ones.
        path.with_suffix(".json").unlink(missing_ok=True)
        self._output.part.replace(path)
        size = self._state.num_bytes if self._output.shard_tokens is None else None
        write_header(path, self._tokenizer, self._count, self._digest.hexdigest(), size)
        self._state.files += 1
        self._save(self._state)
        self._begin()


def write_header(
    path: Path, tokenizer: Tokenizer, num_tokens: int, xxh3: str, num_bytes: int | None
) -> None:
    name, version = TOKEN_FILE_FORMAT
    header = {
        "format": name, "version": version, "dtype": np.dtype(tokenizer.dtype).name,
        "num_tokens": num_tokens, "vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.name,
        "tokenizer_xxh3": tokenizer.checksum, "num_bytes": num_bytes, "xxh3": xxh3,
    }  # fmt: skip
    files.write_atomic(path.with_suffix(".json"), json.dumps(header, indent=2) + "\n")
