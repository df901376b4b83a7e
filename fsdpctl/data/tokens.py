"""Data sets and token streams; token files: raw little-endian NAME.bin, described by NAME.json."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import xxhash
from msgspec import Meta

from fsdpctl.config.model import MOST_TOKENS
from fsdpctl.data.packing import DocumentSet, PackedRows, Sample
from fsdpctl.data.tokenizer import Tokenizer, Tokens
from fsdpctl.errors import UsageError
from fsdpctl.io.activity import BYTES, doing
from fsdpctl.io.files import open_regular, replace, replacing
from fsdpctl.io.untrusted import MIB, as_type, check_version, read_json

_FORMAT, _VERSION = "fsdpctl-tokens", 1
_CHUNK = 1 << 22  # tokens
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True, slots=True)
class TokenStream:
    """Concatenated tokens of text, and where they come from."""

    tokens: Tokens  # 1-D; may be memory-mapped
    num_bytes: int | None  # of the text, if known
    checksum: str | None = None  # xxh3 of the tokens, if known
    origin: str = "the data"

    @property
    def fingerprint(self) -> str:
        """The xxh3 of the tokens, or that of those they were cut from, and the place."""
        if self.checksum is not None:
            return self.checksum
        return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(self.tokens).data)

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    def cut(self, at: int) -> tuple["TokenStream", "TokenStream"]:
        """Return the first `at` tokens and the others; a known checksum need not read them."""
        checksum = None if self.checksum is None else f"{self.checksum}/{at}"
        part = partial(TokenStream, num_bytes=None, checksum=checksum, origin=self.origin)
        return part(self.tokens[:at]), part(self.tokens[at:])

    def rows(self, seq_len: int) -> "StreamRows":
        """Split the stream into samples of `seq_len` tokens, each with the token after it."""
        return StreamRows(self, seq_len)


@dataclass(frozen=True, slots=True)
class StreamRows:
    """The samples of a token stream, without the remainder at its end."""

    stream: TokenStream
    seq_len: int
    holds_documents: ClassVar[bool] = False

    @property
    def origin(self) -> str:
        """The file or text that the samples are from."""
        return self.stream.origin

    @property
    def num_targets(self) -> int:
        """The number of targets: one per token."""
        return len(self) * self.seq_len

    @property
    def emptiness(self) -> str:
        """The error if the data is too short for a sample."""
        return (
            f"train.seq_len={self.seq_len}: longer than the data of {self.stream.num_tokens} tokens"
        )

    def __len__(self) -> int:
        """Return the number of samples."""
        return max(0, (len(self.stream.tokens) - 1) // self.seq_len)

    def __getitem__(self, number: int) -> Sample:
        """Return a sample."""
        start = number * self.seq_len
        found = self.stream.tokens[start : start + self.seq_len + 1].astype(np.int64)
        return Sample(found[:-1], found[1:])

    def count_tokens(self, numbers: Sequence[int]) -> int:
        """Return the tokens of some samples, which all have the same number."""
        return len(numbers) * self.seq_len


Corpus = TokenStream | DocumentSet
Rows = StreamRows | PackedRows


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A token file, with what its sidecar NAME.json says."""

    stream: TokenStream
    vocab_size: int
    tokenizer: str
    tokenizer_xxh3: str

    @property
    def num_bytes(self) -> int:
        """The size of the file in bytes."""
        return int(self.stream.tokens.nbytes)


@dataclass(frozen=True, slots=True)
class _Sidecar:
    """The contents of NAME.json."""

    dtype: Literal["uint16", "uint32"]
    num_tokens: Annotated[int, Meta(ge=0, le=1 << 60)]
    vocab_size: Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
    num_bytes: Annotated[int, Meta(ge=0)] | None
    xxh3: str
    tokenizer: str
    tokenizer_xxh3: str  # `Tokenizer.checksum`


@dataclass(frozen=True, slots=True)
class DataSet:
    """The data that a run trains and validates on."""

    train: Corpus
    val: Corpus | None
    tokenizer: Tokenizer
    vocab_size: int
    description: str
    gzip_bits_per_byte: float | None  # of the validation text, compressed by `gzip -9`
    token_files: tuple[TokenFile, ...] = ()  # that the data is mapped from
    notes: tuple[str, ...] = ()  # lines about the data
    about_files: tuple[str, ...] = ()  # those notes that tell what the files of chats mean
    date: str | None = None  # that chats were rendered with, if the template writes it
    template: str | None = None  # of chats, if it isn't that of the tokenizer
    end_tokens: tuple[int, ...] = ()  # that end a trained assistant message, most frequent first
    prompt: tuple[int, ...] = ()  # to generate a sample from

    @property
    def fingerprint(self) -> str:
        """A checksum of the content of both parts."""
        return self.train.fingerprint + (self.val.fingerprint if self.val else "")


def write_token_file(
    path: Path, tokens: Tokens, tokenizer: Tokenizer, *, num_bytes: int | None
) -> None:
    """Write NAME.bin and NAME.json. The header is last, so that a truncated file has none.

    Args:
        path: The path of NAME.bin.
        tokens: The tokens of a text.
        tokenizer: The tokenizer that made them.
        num_bytes: The size of the text, if known.
    """
    vocab_size = tokenizer.vocab_size
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    data = np.ascontiguousarray(tokens, dtype=_DTYPES[dtype])
    header = {
        "format": _FORMAT,
        "version": _VERSION,
        "dtype": dtype,
        "num_tokens": int(data.size),
        "vocab_size": vocab_size,
        "tokenizer": tokenizer.name,
        "tokenizer_xxh3": tokenizer.checksum,
        "num_bytes": num_bytes,
        "xxh3": xxhash.xxh3_64_hexdigest(data.data),
    }
    with replacing(path, durable=True) as file:
        file.write(data.data)
    replace(path.with_suffix(".json"), json.dumps(header, indent=2) + "\n")


def open_token_file(path: Path, key: str = "data.path") -> TokenFile:
    """Map the tokens of `path` (NAME.bin) into memory.

    Raises:
        UsageError: If the file or its header is missing, or if they disagree.
    """
    if not path.is_file():
        raise UsageError(f"{key}={path}: no such token file; `fsdpctl tokenize` creates one")
    header = _read_sidecar(path, key)
    dtype, count = _DTYPES[header.dtype], header.num_tokens
    if path.stat().st_size != count * dtype.itemsize:
        raise UsageError(
            f"{key}={path}: expected {count} tokens of {dtype.itemsize} bytes by its header, got "
            f"{path.stat().st_size} bytes"
        )
    if count == 0:
        raise UsageError(f"{key}={path}: contains no tokens")
    os.close(open_regular(path, follows=True))
    tokens = np.memmap(path, dtype=dtype, mode="r")
    return TokenFile(
        TokenStream(tokens, header.num_bytes, header.xxh3, str(path)),
        header.vocab_size,
        header.tokenizer,
        header.tokenizer_xxh3,
    )


def check_tokens(file: TokenFile) -> None:
    """Read and check all tokens.

    Raises:
        UsageError: If the checksum differs from the header's, or a token isn't in the vocabulary.
    """
    stream, digest = file.stream, xxhash.xxh3_64()
    with doing(f"checking {stream.origin}", BYTES, file.num_bytes) as advance:
        for start in range(0, len(stream.tokens), _CHUNK):
            part = np.ascontiguousarray(stream.tokens[start : start + _CHUNK])
            digest.update(part.data)
            if int(part.max()) >= file.vocab_size:
                at = start + int(part.argmax())
                raise UsageError(
                    f"{stream.origin}: token {at}: expected less than {file.vocab_size}, the size "
                    f"of the vocabulary, got {part.max()}"
                )
            advance(part.nbytes)
    if digest.hexdigest() != stream.checksum:
        raise UsageError(f"{stream.origin}: corrupted: the checksum differs from its header")


def _read_sidecar(path: Path, key: str) -> _Sidecar:
    file = path.with_suffix(".json")
    if not file.exists():
        raise UsageError(
            f"{key}={path}: the header {file.name} is missing; "
            "`fsdpctl tokenize` turns text into a token file"
        )
    content = read_json(file, dict[str, Any], most_bytes=MIB, follows=True)
    what = "the header of a token file"
    check_version(content, (_FORMAT, _VERSION), what, str(file), UsageError)
    return as_type(content, _Sidecar, str(file))
