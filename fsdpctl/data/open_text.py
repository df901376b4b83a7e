"""Text as data: one process tokenizes it, and the others memory-map the tokens from the cache."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import xxhash

from fsdpctl.config.data import CHAT, TEXT, DataConfig
from fsdpctl.config.data_files import DataFiles, kind_of_file
from fsdpctl.data.data_set import DataSet
from fsdpctl.data.documents import hold_out, read_text, skipped_summary, standard_library
from fsdpctl.data.find_data import find_data
from fsdpctl.data.streams import TokenStream
from fsdpctl.data.token_cache import entry_name, read_cache, write_cache
from fsdpctl.data.tokenizer import BATCH_BYTES, ByteTokenizer, TextPiece, Tokenizer
from fsdpctl.errors import UsageError, shorten_list
from fsdpctl.io.activity import doing
from fsdpctl.io.texts import MIB, batch_by_size
from fsdpctl.io.untrusted import Count, as_type

STDLIB = "python_stdlib"
_CACHE_VERSION = 5  # a part of cache keys; increase it if the same text gives other tokens
_SMALL = 16 * MIB  # bytes of text; byte tokens of smaller texts are not cached


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens of text: the name of their cache entry, empty if not cached, and the text's bytes."""

    name: str
    num_bytes: Count


@dataclass(frozen=True, slots=True)
class _TextIndex:
    """The facts about files of text whose tokens are in the cache."""

    train: _Part
    val: _Part | None
    has_val_files: bool
    skipped: list[str]
    notes: list[str]


_Opened = tuple[_TextIndex, TokenStream, TokenStream | None]


def open_text(
    tokenizer: Tokenizer, config: DataConfig, key: str, data_files: DataFiles | None = None
) -> DataSet:
    """Return the tokens of the text at `config.path`, the value of the setting `key`.

    `data_files` are the files of this path, if they are known. No file is read if the cache has the
    tokens of files with these sizes and times. UsageError if there is no text to train on.
    """
    files = tuple[Path, ...]()
    if config.name == STDLIB:
        texts = _standard_library(config)
        index, train, val = _split_and_encode(tokenizer, config, texts, [])
        summary = f"Python's standard library, {len(texts)} files"
    else:
        path, validates = str(config.path), config.uses_validation_files
        data_files = data_files or find_data(path, key, TEXT)
        files = (*data_files.files, *(data_files.validation if validates else ()))
        name = _entry_name_of(files, tokenizer, config)
        if (opened := _from_cache(name)) is None:
            opened = _read(data_files, tokenizer, config, key)
            # Byte tokens of small texts are not cached.
            if all(part is None or part.name for part in (opened[0].train, opened[0].val)):
                write_cache(name, {}, asdict(opened[0]))
        index, train, val = opened
        summary = f"{path}, {data_files.summary(validates=validates, skipped=len(index.skipped))}"
        summary += skipped_summary(index.skipped)
    return DataSet(
        train, val, tokenizer, tokenizer.vocab_size, summary, files=files, notes=(*index.notes,),
        has_val_files=index.has_val_files,
    )  # fmt: skip


def _entry_name_of(files: Sequence[Path], tokenizer: Tokenizer, config: DataConfig) -> str:
    validation = config.used_val_fraction, config.uses_validation_files
    return entry_name("texts", (_CACHE_VERSION, tokenizer.checksum, *validation), files)


def has_cached_text(tokenizer: Tokenizer, config: DataConfig, files: DataFiles) -> bool:
    paths = (*files.files, *files.validation)
    return _from_cache(_entry_name_of(paths, tokenizer, config)) is not None


def _standard_library(config: DataConfig) -> list[bytes]:
    if config.path is not None:
        is_chat = kind_of_file(Path(config.path)) == CHAT
        kinds = "data=chat, data=text" if is_chat else "data=text, data=chat"
        raise UsageError(f"data.path={config.path}: only valid with {kinds} or data=tokens")
    return standard_library()


def _from_cache(name: str) -> _Opened | None:
    if (entry := read_cache(name)) is None:
        return None
    try:
        index = as_type(entry.facts, _TextIndex, name)
    except UsageError:
        return None
    train, val = (_stream(part) if part else None for part in (index.train, index.val))
    if train is None or (val is None) != (index.val is None):
        return None
    return index, train, val


def _stream(part: _Part) -> TokenStream | None:
    entry = read_cache(part.name)
    if entry is None or "tokens" not in entry.arrays:
        return None
    return TokenStream(entry.arrays["tokens"], part.num_bytes, entry.checksums["tokens"])


def _read(data_files: DataFiles, tokenizer: Tokenizer, config: DataConfig, key: str) -> _Opened:
    texts, skipped = read_text(data_files, key, str(config.path))
    val_texts = list[bytes]()
    if config.uses_validation_files and data_files.validation:
        val_files = DataFiles(data_files.kind, data_files.validation)
        path = shorten_list([*map(str, val_files.files)])
        val_texts, skipped_val = read_text(val_files, key, path)
        skipped.files += skipped_val.files
    return _split_and_encode(tokenizer, config, texts, val_texts, skipped.files, skipped.notes())


def _split_and_encode(
    tokenizer: Tokenizer,
    config: DataConfig,
    texts: Sequence[bytes],
    val_texts: Sequence[bytes],
    skipped: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> _Opened:
    has_val_files = bool(val_texts)
    if not has_val_files:
        texts, val_texts = hold_out(texts, config.used_val_fraction)
    if not texts:
        fraction = f"{config.used_val_fraction:g}"
        raise UsageError(f"data.val_fraction={fraction}: leaves nothing to train on")
    train, stream = _encode(tokenizer, texts)
    val, val_stream = _encode(tokenizer, val_texts) if val_texts else (None, None)
    return _TextIndex(train, val, has_val_files, [*skipped], [*notes]), stream, val_stream


def _encode(tokenizer: Tokenizer, texts: Sequence[bytes]) -> tuple[_Part, TokenStream]:
    """Tokenize texts, and cache the tokens if computing or storing them is expensive."""
    size = sum(map(len, texts))
    pieces = (TextPiece(each.decode(), len(each)) for each in texts)
    if isinstance(tokenizer, ByteTokenizer) and size < _SMALL:
        return _Part("", size), TokenStream(tokenizer.encode_pieces([*pieces]), size)
    digest = xxhash.xxh3_128(f"{_CACHE_VERSION} {tokenizer.checksum}".encode())
    for text in texts:
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    part = _Part(f"text-{digest.hexdigest()}", size)
    if (stream := _stream(part)) is None:
        batches = batch_by_size(pieces, lambda piece: piece.size, BATCH_BYTES)
        with doing("tokenizing text"):
            tokens = np.concatenate([tokenizer.encode_pieces(each) for each in batches])
        entry = write_cache(part.name, {"tokens": tokens}, {})
        stream = TokenStream(entry.arrays["tokens"], size, entry.checksums["tokens"])
    return part, stream
