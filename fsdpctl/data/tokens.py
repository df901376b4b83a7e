"""Token files: raw little-endian uint16 or uint32 in NAME.bin, described by NAME.json."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import xxhash
from msgspec import Meta

from fsdpctl.config.model import MOST_TOKENS
from fsdpctl.data.rows import Sample
from fsdpctl.data.tokenizer import Tokenizer, Tokens, tokenizer_checksum
from fsdpctl.errors import UsageError
from fsdpctl.io.documents import MIB, as_type, check_version, read_json
from fsdpctl.io.files import open_regular

_FORMAT, _VERSION = "fsdpctl-tokens", 1
_CHECKED_AT_ONCE = 1 << 22  # tokens
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True, slots=True)
class TokenStream:
    """Tokens one after another, and what is known about where they come from."""

    tokens: Tokens  # 1-D; may be a memory map
    num_bytes: int | None  # of the text that they stand for
    checksum: str = ""  # as their file's header says
    origin: str = "the data"

    @property
    def fingerprint(self) -> str:
        """Identifies the content: xxh3 of the tokens, unless their file says it already."""
        return self.checksum or xxhash.xxh3_64_hexdigest(np.ascontiguousarray(self.tokens).data)

    @property
    def num_tokens(self) -> int:
        """All that there are."""
        return len(self.tokens)

    def rows(self, seq_len: int) -> "StreamRows":
        """Stretches of `seq_len` tokens, each with the token that follows it."""
        return StreamRows(self, seq_len)


@dataclass(frozen=True, slots=True)
class StreamRows:
    """A token stream cut into samples; what is left at its end is in none."""

    stream: TokenStream
    seq_len: int
    holds_documents: ClassVar[bool] = False

    @property
    def origin(self) -> str:
        """Of the stream."""
        return self.stream.origin

    @property
    def num_targets(self) -> int:
        """Every token of a sample has one."""
        return len(self) * self.seq_len

    @property
    def emptiness(self) -> str:
        """That the data is too short."""
        return (
            f"train.seq_len={self.seq_len}: longer than the data, which has "
            f"{self.stream.num_tokens} tokens"
        )

    def __len__(self) -> int:
        """How many there are."""
        return max(0, (len(self.stream.tokens) - 1) // self.seq_len)

    def __getitem__(self, number: int) -> Sample:
        """One of them."""
        start = number * self.seq_len
        found = self.stream.tokens[start : start + self.seq_len + 1].astype(np.int64)
        return Sample(found[:-1], found[1:])

    def count_tokens(self, numbers: Sequence[int]) -> int:
        """As many in each."""
        return len(numbers) * self.seq_len


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A token file's stream and header."""

    stream: TokenStream
    vocab_size: int
    tokenizer: str
    tokenizer_xxh3: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tokens."""
        return int(self.stream.tokens.nbytes)


@dataclass(frozen=True, slots=True)
class _Header:
    """What NAME.json says."""

    dtype: Literal["uint16", "uint32"]
    num_tokens: Annotated[int, Meta(ge=0, le=1 << 60)]
    vocab_size: Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
    num_bytes: Annotated[int, Meta(ge=0)] | None
    xxh3: str
    tokenizer: str = "unknown"
    tokenizer_xxh3: str = ""  # of its tokenizer.json


def write_token_file(
    path: Path, tokens: Tokens, tokenizer: Tokenizer, *, num_bytes: int | None
) -> None:
    """Write NAME.bin and NAME.json; the header comes last, so that a torn file has none.

    Args:
        path: NAME.bin.
        tokens: what `tokenizer` made of a text.
        tokenizer: is named there, with a checksum of its tokenizer.json.
        num_bytes: of the text, if known.
    """
    vocab_size = tokenizer.vocab_size
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    data = np.ascontiguousarray(tokens, dtype=_DTYPES[dtype])
    scratch = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            file.write(data.data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
    header = {
        "format": _FORMAT,
        "version": _VERSION,
        "dtype": dtype,
        "num_tokens": int(data.size),
        "vocab_size": vocab_size,
        "tokenizer": tokenizer.name,
        "tokenizer_xxh3": tokenizer_checksum(tokenizer),
        "num_bytes": num_bytes,
        "xxh3": xxhash.xxh3_64_hexdigest(data.data),
    }
    scratch.replace(path)
    path.with_suffix(".json").write_text(json.dumps(header, indent=2) + "\n")


def open_token_file(path: Path, key: str = "data.path") -> TokenFile:
    """The memory-mapped tokens of `path` (NAME.bin).

    Raises:
        UsageError: it is missing, has no header, or is not as long as the header says.
    """
    if not path.is_file():
        raise UsageError(f"{key}={path}: no such token file; `fsdpctl tokenize` makes one")
    header = _read_header(path, key)
    dtype, count = _DTYPES[header.dtype], header.num_tokens
    if path.stat().st_size != count * dtype.itemsize:
        raise UsageError(
            f"{key}={path}: {path.stat().st_size} bytes, where its header says {count} tokens "
            f"of {dtype.itemsize}"
        )
    if count == 0:
        raise UsageError(f"{key}={path}: there are no tokens in it")
    os.close(open_regular(path, follows=True))
    tokens = np.memmap(path, dtype=dtype, mode="r")
    return TokenFile(
        TokenStream(tokens, header.num_bytes, header.xxh3, str(path)),
        header.vocab_size,
        header.tokenizer,
        header.tokenizer_xxh3,
    )


def check_tokens(file: TokenFile, on_bytes: Callable[[int], None] = lambda count: None) -> None:
    """Read every token; `on_bytes` is called with the bytes read since the last call.

    Raises:
        UsageError: they are not those that the header describes, or above the vocabulary.
    """
    stream, digest = file.stream, xxhash.xxh3_64()
    for start in range(0, len(stream.tokens), _CHECKED_AT_ONCE):
        part = np.ascontiguousarray(stream.tokens[start : start + _CHECKED_AT_ONCE])
        digest.update(part.data)
        if int(part.max()) >= file.vocab_size:
            at = start + int(part.argmax())
            raise UsageError(
                f"{stream.origin}: token {at} is {part.max()}, above its vocabulary of "
                f"{file.vocab_size}"
            )
        on_bytes(part.nbytes)
    if digest.hexdigest() != stream.checksum:
        raise UsageError(f"{stream.origin}: damaged: not the tokens that its header describes")


def _read_header(path: Path, key: str) -> _Header:
    file = path.with_suffix(".json")
    if not file.exists():
        raise UsageError(f"{key}={path}: there is no {file.name} beside it that describes it")
    content = read_json(file, dict[str, Any], most_bytes=MIB, follows=True)
    what = "the header of a token file"
    check_version(content, (_FORMAT, _VERSION), what, str(file), UsageError)
    return as_type(content, _Header, str(file))
