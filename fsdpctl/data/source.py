"""From the data section of a configuration to token streams."""

import gzip
import os
from dataclasses import dataclass
from pathlib import Path

import xxhash

from fsdpctl.config.data import CHAT, DataConfig, refuse_keys_of_chats
from fsdpctl.data.files import Text, hold_out, left_out, read_text, standard_library
from fsdpctl.data.rows import Corpus
from fsdpctl.data.tokenizer import (
    BYTES,
    TOKENIZER_JSON,
    ByteTokenizer,
    Tokenizer,
    open_tokenizer,
    tokenizer_checksum,
)
from fsdpctl.data.tokens import TokenFile, TokenStream, open_token_file, write_token_file
from fsdpctl.errors import UsageError

_ENCODING = 2  # counts the ways in which text was encoded: what another one cached is not used
_GZIP_LEAST = 16 << 10  # below, gzip's header and empty window are most of the figure
_GZIP_LIMIT = 64 << 20  # above, compressing for comparison takes longer than it is worth


@dataclass(frozen=True, slots=True)
class DataSet:
    """What a run trains on and validates with."""

    train: Corpus
    val: Corpus | None
    tokenizer: Tokenizer
    vocab_size: int
    description: str
    gzip_bits_per_byte: float | None  # what `gzip -9` needs for the validation text
    token_files: tuple[TokenFile, ...] = ()  # that it is mapped from
    notes: tuple[str, ...] = ()  # what is worth saying, a line each
    date: str | None = None  # that it was made with, where that makes a difference
    template: str | None = None  # of chats, where it is not the tokenizer's own
    end_tokens: tuple[int, ...] = ()  # that end an answer, where that is trained
    prompt: tuple[int, ...] = ()  # for a sample of what the model makes of it

    @property
    def fingerprint(self) -> str:
        """Identifies the content of both parts."""
        return self.train.fingerprint + (self.val.fingerprint if self.val else "")


def load_data(config: DataConfig) -> DataSet:
    """Read (or map) the data of a run.

    Raises:
        UsageError: it is missing, empty or not what it should be.
    """
    if config.name == CHAT:
        raise UsageError("data=chat: chats are no text: fsdpctl.data.chats.open reads them")
    refuse_keys_of_chats(config)
    if config.name == "tokens":
        return _from_token_files(config)
    tokenizer = open_tokenizer(config.tokenizer)
    text, where = _read(config)
    train, val = _split(text, config)
    skipped = left_out(text)
    files = "file" if len(text.documents) == 1 else "files"
    return DataSet(
        _encode(tokenizer, train),
        _encode(tokenizer, val) if val else None,
        tokenizer,
        tokenizer.vocab_size,
        f"{where}, {len(text.documents)} {files}{skipped}",
        _gzip_bits(val) if val else None,
    )


def _read(config: DataConfig) -> tuple[Text, str]:
    if config.name == "python_stdlib":
        if config.path is not None:
            raise UsageError(f"data.path={config.path}: is read with data=text or data=tokens")
        return standard_library(), "Python's standard library"
    if config.path is None:
        raise UsageError("data=text: say which, as data.path=FILE, DIR or GLOB")
    return read_text(config.path), config.path


def _split(text: Text, config: DataConfig) -> tuple[Text, Text | None]:
    if config.val_path is not None:
        return text, read_text(config.val_path, "data.val_path")
    train, val = hold_out(text, config.val_fraction)
    if not train.documents:
        raise UsageError(f"data.val_fraction={config.val_fraction:g}: leaves nothing to train on")
    return train, val


def _from_token_files(config: DataConfig) -> DataSet:
    if config.path is None:
        raise UsageError("data=tokens: say which, as data.path=FILE.bin")
    file = open_token_file(Path(config.path))
    train, val, held = file.stream, None, None
    if config.val_path is not None:
        held = open_token_file(Path(config.val_path), "data.val_path")
        if held.vocab_size != file.vocab_size:
            raise UsageError(
                f"data.val_path={config.val_path}: a vocabulary of {held.vocab_size}, where "
                f"data.path has one of {file.vocab_size}"
            )
        val = held.stream
    elif config.val_fraction:
        cut = len(train.tokens) - int(len(train.tokens) * config.val_fraction)
        parts = train.tokens[:cut], train.tokens[cut:]
        train, val = (
            TokenStream(part, None, f"{train.checksum}/{cut}", train.origin) for part in parts
        )
    tokenizer = open_tokenizer(config.tokenizer) if config.tokenizer else _tokenizer_of(file)
    files = (file,) if held is None else (file, held)
    return DataSet(train, val, tokenizer, file.vocab_size, config.path, None, files)


def _tokenizer_of(file: TokenFile) -> Tokenizer:
    """The one that the file names, where that is still what made it; else of bytes."""
    if (Path(file.tokenizer) / TOKENIZER_JSON).is_file():
        found = open_tokenizer(file.tokenizer)
        if tokenizer_checksum(found) == file.tokenizer_xxh3:
            return found
    return ByteTokenizer()


def _encode(tokenizer: Tokenizer, text: Text) -> TokenStream:
    """Tokens of the text; those that cost time are kept in the user's cache, by content."""
    if tokenizer.name == BYTES:
        return TokenStream(tokenizer.encode(text), text.num_bytes)
    digest = xxhash.xxh3_128(f"{_ENCODING} {tokenizer_checksum(tokenizer)}".encode())
    for document in text.documents:
        digest.update(len(document).to_bytes(8, "little"))
        digest.update(document)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fsdpctl"
    path = folder / f"{digest.hexdigest()}.bin"
    if path.with_suffix(".json").is_file():
        return open_token_file(path).stream
    tokens = tokenizer.encode(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_token_file(path, tokens, tokenizer, num_bytes=text.num_bytes)
    except OSError:  # a cache that cannot be written only costs time
        pass
    return TokenStream(tokens, text.num_bytes)


def _gzip_bits(text: Text) -> float | None:
    if not _GZIP_LEAST <= text.num_bytes <= _GZIP_LIMIT:
        return None
    return 8 * len(gzip.compress(b"".join(text.documents), 9, mtime=0)) / text.num_bytes
