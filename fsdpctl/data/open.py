"""The data of a run: text, token files or chats, opened by the section `data`."""

import gzip
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import xxhash

from fsdpctl.config.data import CHAT, LOSS, MOST_HELD_OUT, TOKENS, DataConfig, check_chat_keys
from fsdpctl.config.sources import DataSource, sources_in
from fsdpctl.data.cache import read_cache, write_cache
from fsdpctl.data.chats.open import open_chats
from fsdpctl.data.data_set import DataSet
from fsdpctl.data.files import Text, hold_out, left_out, read_text, standard_library
from fsdpctl.data.mixture import PERIOD, MixedSource, Mixture
from fsdpctl.data.token_files import stream_of
from fsdpctl.data.token_formats import TokenFile, open_token_files
from fsdpctl.data.tokenizer import BYTES, ByteTokenizer, Tokenizer, open_tokenizer
from fsdpctl.data.tokenizer_files import has_tokenizer
from fsdpctl.data.tokens import TokenStream
from fsdpctl.errors import UsageError, first_of

_OWN = "python_stdlib"
_ENCODING = 4  # increase it if the same text gives other tokens
_GZIP_LEAST = 16 << 10  # bytes; below, gzip's header and empty window dominate the figure
_GZIP_LIMIT = 64 << 20  # above, compressing for the comparison takes too long


def open_data(config: DataConfig, seed: int = 0) -> DataSet:
    """Read the data of a run, or open its token files.

    Args:
        config: The section `data`.
        seed: Determines which conversations share a sequence.

    Raises:
        UsageError: If the data is missing, empty or corrupted, or if a key doesn't apply to it.
    """
    if config.name == CHAT:
        return open_chats(config, seed)
    check_chat_keys(config)
    open_one: Callable[..., DataSet] = _from_token_files
    if config.name != TOKENS:
        open_one = partial(_from_text, open_tokenizer(config.tokenizer))
    if config.path is None or config.name == _OWN:
        return open_one(config)
    sources = sources_in(config.path)
    if len(sources) == 1:
        return open_one(replace(config, path=sources[0].path))
    held = None
    if config.val_path is not None:
        alone = replace(config, path=config.val_path, val_path=None, val_fraction=0.0)
        held = open_one(alone, key="data.val_path")
        config = replace(config, val_path=None, val_fraction=0.0)
    found = [open_one(replace(config, path=each.path)) for each in sources]
    mixed = mix(sources, found)
    if held is None:
        return mixed
    _check_alike(sources[0].path, found[0], str(alone.path), held)
    files, notes = (
        (*mixed.token_files, *held.token_files),
        dict.fromkeys((*mixed.notes, *held.notes)),
    )
    return replace(mixed, val=held.train, token_files=files, notes=tuple(notes))


def mix(sources: Sequence[DataSource], found: Sequence[DataSet]) -> DataSet:
    """Return the data of several sources; without shares, each has that of its tokens.

    Raises:
        UsageError: If two have one name, or are of other tokenizers.
    """
    first, names = found[0], [each.name for each in sources]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"data.path: two sources are called {twice[0]}; write NAME=PATH:SHARE")
    for source, other in zip(sources, found, strict=True):
        _check_alike(sources[0].path, first, source.path, other)
    total = sum(each.train.num_tokens for each in found)
    shares = [
        one.train.num_tokens / total if each.share is None else each.share
        for each, one in zip(sources, found, strict=True)
    ]

    if least := next((n for n, x in zip(names, shares, strict=True) if x * PERIOD < 0.5), None):
        raise UsageError(
            f"data.path: {least}: its share is less than one of {PERIOD:,} samples; give it "
            "a larger one, or join it with another source"
        )

    def part(name: str) -> tuple[MixedSource, ...]:
        streams = [getattr(each, name) for each in found]
        about = zip(sources, shares, streams, strict=True)
        return tuple(MixedSource(s.name, share, s.epochs, each) for s, share, each in about if each)

    val = part("val")
    return replace(
        first,
        train=Mixture(part("train")),
        val=Mixture(val, " (data.val_fraction)") if val else None,
        description=", ".join(f"{n} ({x:.1%})" for n, x in zip(names, shares, strict=True)),
        gzip_bits_per_byte=None,
        token_files=tuple(file for each in found for file in each.token_files),
        notes=(
            *(f"{n}: {each.description}" for n, each in zip(names, found, strict=True)),
            *dict.fromkeys(note for each in found for note in each.notes),
        ),
    )


def _check_alike(path: str, one: DataSet, other_path: str, other: DataSet) -> None:
    """Check that the tokens of two sources are of one tokenizer."""
    alike = other.tokenizer.checksum == one.tokenizer.checksum
    if not alike or other.vocab_size != one.vocab_size:
        raise UsageError(
            f"{other_path}: tokens of {other.tokenizer.name}, {other.vocab_size:,} different ones, "
            f"unlike those of {path}: of {one.tokenizer.name}, {one.vocab_size:,}"
        )


def _from_text(tokenizer: Tokenizer, config: DataConfig, key: str = "data.path") -> DataSet:
    text, where = _read(config, key)
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


def _read(config: DataConfig, key: str) -> tuple[Text, str]:
    if config.name == _OWN:
        if config.path is not None:
            is_chat = config.path.removesuffix(".gz").endswith((".jsonl", ".parquet"))
            kinds = "data=chat, data=text" if is_chat else "data=text, data=chat"
            raise UsageError(f"data.path={config.path}: only valid with {kinds} or data=tokens")
        return standard_library(), "Python's standard library"
    if config.path is None:
        raise UsageError("data=text: data.path is required: a file, a directory or a glob")
    return read_text(config.path, key), config.path


def _split(text: Text, config: DataConfig) -> tuple[Text, Text | None]:
    if config.val_path is not None:
        return text, read_text(config.val_path, "data.val_path")
    train, val = hold_out(text, config.val_fraction)
    if not train.documents:
        raise UsageError(f"data.val_fraction={config.val_fraction:g}: leaves nothing to train on")
    return train, val


def _from_token_files(config: DataConfig, key: str = "data.path") -> DataSet:
    if config.path is None:
        raise UsageError("data=tokens: data.path is required, such as data.path=FILE.bin")
    kind, isolates = config.format, bool(config.packing)
    files = open_token_files(config.path, key, kind)
    train, val, held = stream_of(files, config.path, isolates=isolates), None, []
    if config.val_path is not None:
        held = open_token_files(config.val_path, "data.val_path", kind)
        if held[0].vocab_size != files[0].vocab_size:
            raise UsageError(
                f"data.val_path={config.val_path}: expected a vocabulary of "
                f"{files[0].vocab_size}, as in data.path, got {held[0].vocab_size}"
            )
        val = stream_of(held, config.val_path, isolates=isolates)
    elif config.val_fraction:
        count = train.num_tokens
        train, val = train.cut(count - min(int(count * config.val_fraction), MOST_HELD_OUT))
    both = (*files, *held)
    if isolates and (unknown := next((x for x in both if x.shard.index is None), None)):
        raise UsageError(
            f"data.packing=true: {unknown.shard.path}: its format, {unknown.kind}, does not tell "
            "where documents end"
        )
    tokenizer = _tokenizer_of(files[0])
    notes = tuple(_notes_on(both))
    if config.tokenizer is not None:
        tokenizer = open_tokenizer(config.tokenizer)
        notes += _check_tokenizer("data.path", files[0], tokenizer)
        if held:
            _check_tokenizer("data.val_path", held[0], tokenizer)
    known = 0 if config.tokenizer is None else tokenizer.vocab_size
    description = config.path if len(files) == 1 else f"{config.path}, {len(files):,} files"
    return DataSet(
        train, val, tokenizer, files[0].vocab_size or known, description, None, both, notes
    )


def _notes_on(files: Sequence[TokenFile]) -> Iterator[str]:
    paths = [f"{each.shard.path}{LOSS}" for each in files if each.shard.flags is not None]
    if paths:
        yield f"tokens excluded from the loss by {first_of(paths, 2)} are not trained on"
    if found := next((each for each in files if each.hint), None):
        yield f"{found.shard.path}: {found.hint}"


def _tokenizer_of(file: TokenFile) -> Tokenizer:
    """Return the tokenizer that the file names if it is unchanged, else the byte tokenizer."""
    if file.tokenizer_xxh3 is not None and has_tokenizer(Path(str(file.tokenizer))):
        found = open_tokenizer(file.tokenizer)
        if file.tokenizer_xxh3 == found.checksum:
            return found
    return ByteTokenizer()


def _check_tokenizer(key: str, file: TokenFile, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Check that a file has the tokens of the model, as far as it tells; return a note on that."""
    path = file.shard.path
    if file.tokenizer_xxh3 is None:
        named = "no tokenizer" if file.tokenizer is None else f"the tokenizer {file.tokenizer}"
        return (f"{path} ({file.kind}) names {named}: read as tokens of {tokenizer.name}",)
    if file.tokenizer_xxh3 == tokenizer.checksum:
        return ()
    same = file.tokenizer == tokenizer.name
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
