"""The data of a run: text, token files or chats, opened by the section `data`."""

import gzip
from pathlib import Path

import xxhash

from fsdpctl.config.data import CHAT, DataConfig, check_chat_keys
from fsdpctl.data.cache import read_cache, write_cache
from fsdpctl.data.chats.open import open_chats
from fsdpctl.data.files import Text, hold_out, left_out, read_text, standard_library
from fsdpctl.data.tokenizer import BYTES, ByteTokenizer, Tokenizer, open_tokenizer
from fsdpctl.data.tokenizer_files import has_tokenizer
from fsdpctl.data.tokens import DataSet, TokenFile, TokenStream, open_token_file
from fsdpctl.errors import UsageError

_ENCODING = 4  # increase it if the same text gives other tokens
_GZIP_LEAST = 16 << 10  # bytes; below, gzip's header and empty window dominate the figure
_GZIP_LIMIT = 64 << 20  # above, compressing for the comparison takes too long


def open_data(config: DataConfig, seed: int = 0) -> DataSet:
    """Read or map the data of a run.

    Args:
        config: The section `data`.
        seed: Determines which conversations share a sequence.

    Raises:
        UsageError: If the data is missing, empty or corrupted, or if a key doesn't apply to it.
    """
    if config.name == CHAT:
        return open_chats(config, seed)
    check_chat_keys(config)
    if config.name == "tokens":
        return _from_token_files(config)
    tokenizer = open_tokenizer(config.tokenizer)
    text, where = _read(config)
    train, val = _split(text, config)
    skipped = left_out(text.skipped)
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
            is_chat = config.path.removesuffix(".gz").endswith((".jsonl", ".parquet"))
            kinds = "data=chat, data=text" if is_chat else "data=text, data=chat"
            raise UsageError(f"data.path={config.path}: only valid with {kinds} or data=tokens")
        return standard_library(), "Python's standard library"
    if config.path is None:
        raise UsageError("data=text: data.path is required: a file, a directory or a glob")
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
        raise UsageError("data=tokens: data.path is required, such as data.path=FILE.bin")
    file = open_token_file(Path(config.path))
    train, val, held = file.stream, None, None
    if config.val_path is not None:
        held = open_token_file(Path(config.val_path), "data.val_path")
        if held.vocab_size != file.vocab_size:
            raise UsageError(
                f"data.val_path={config.val_path}: expected a vocabulary of {file.vocab_size}, as "
                f"in data.path, got {held.vocab_size}"
            )
        val = held.stream
    elif config.val_fraction:
        count = len(train.tokens)
        train, val = train.cut(count - int(count * config.val_fraction))
    files = {"data.path": file} | ({} if held is None else {"data.val_path": held})
    if config.tokenizer is None:
        tokenizer = _tokenizer_of(file)
    else:
        tokenizer = open_tokenizer(config.tokenizer)
        for key, each in files.items():
            _check_tokenizer(key, each, tokenizer)
    return DataSet(train, val, tokenizer, file.vocab_size, config.path, None, tuple(files.values()))


def _tokenizer_of(file: TokenFile) -> Tokenizer:
    """Return the tokenizer that the file names if it is unchanged, else the byte tokenizer."""
    if has_tokenizer(Path(file.tokenizer)):
        found = open_tokenizer(file.tokenizer)
        if file.tokenizer_xxh3 == found.checksum:
            return found
    return ByteTokenizer()


def _check_tokenizer(key: str, file: TokenFile, tokenizer: Tokenizer) -> None:
    """Check that a file has the tokens of the model."""
    if file.tokenizer_xxh3 == tokenizer.checksum:
        return
    path, same = file.stream.origin, file.tokenizer == tokenizer.name
    raise UsageError(
        f"{key}={path}: expected tokens of the tokenizer {tokenizer.name}, got those of "
        f"{'an earlier version of it' if same else file.tokenizer}; run `fsdpctl tokenize SRC "
        f"{path} --tokenizer {tokenizer.name} --overwrite`, or set model.init=random"
    )


def _encode(tokenizer: Tokenizer, text: Text) -> TokenStream:
    """Tokenize text. The cache keeps tokens that take time to compute."""
    if tokenizer.name == BYTES:
        return TokenStream(tokenizer.encode(text), text.num_bytes)
    digest = xxhash.xxh3_128(f"{_ENCODING} {tokenizer.checksum}".encode())
    for document in text.documents:
        digest.update(len(document).to_bytes(8, "little"))
        digest.update(document)
    name = f"text-{digest.hexdigest()}"
    entry = read_cache(name) or write_cache(name, {"tokens": tokenizer.encode(text)}, {})
    return TokenStream(entry.arrays["tokens"], text.num_bytes, entry.checksums["tokens"])


def _gzip_bits(text: Text) -> float | None:
    if not _GZIP_LEAST <= text.num_bytes <= _GZIP_LIMIT:
        return None
    return 8 * len(gzip.compress(b"".join(text.documents), 9, mtime=0)) / text.num_bytes
