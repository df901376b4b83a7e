"""Token files: raw little-endian uint16 or uint32 in NAME.bin, described by NAME.json."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from fsdpctl.data.tokenizer import Tokens
from fsdpctl.errors import UsageError

_FORMAT = "fsdpctl-tokens"
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

    def num_samples(self, seq_len: int) -> int:
        """How many samples of `seq_len` tokens and their targets there are."""
        return max(0, (len(self.tokens) - 1) // seq_len)


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A token file's stream and header."""

    stream: TokenStream
    vocab_size: int
    tokenizer: str


def write_token_file(
    path: Path, tokens: Tokens, *, vocab_size: int, tokenizer: str, num_bytes: int | None
) -> None:
    """Write NAME.bin and NAME.json; the header comes last, so that a torn file has none."""
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
        "version": 1,
        "dtype": dtype,
        "num_tokens": int(data.size),
        "vocab_size": vocab_size,
        "tokenizer": tokenizer,
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
    try:
        dtype = _DTYPES[header["dtype"]]
        count, vocab_size = int(header["num_tokens"]), int(header["vocab_size"])
        num_bytes, checksum = header["num_bytes"], str(header["xxh3"])
        if vocab_size < 1 or not (num_bytes is None or isinstance(num_bytes, int)):
            raise ValueError("vocab_size or num_bytes")
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{key}={path}: its header lacks or garbles {error}") from None
    if path.stat().st_size != count * dtype.itemsize:
        raise UsageError(
            f"{key}={path}: {path.stat().st_size} bytes, where its header says {count} tokens "
            f"of {dtype.itemsize}"
        )
    if count == 0:
        raise UsageError(f"{key}={path}: there are no tokens in it")
    tokens = np.memmap(path, dtype=dtype, mode="r")
    return TokenFile(
        TokenStream(tokens, num_bytes, checksum, str(path)),
        vocab_size,
        str(header.get("tokenizer", "unknown")),
    )


def _read_header(path: Path, key: str) -> dict[str, Any]:
    file = path.with_suffix(".json")
    if not file.is_file():
        raise UsageError(f"{key}={path}: there is no {file.name} beside it that describes it")
    try:
        header = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: not JSON: {error}") from None
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise UsageError(f"{file}: not the header of a token file")
    return header
