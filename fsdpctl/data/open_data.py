"""The data of a run, opened by the settings `data.*`: text, token files or chats."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from fsdpctl.config.data import (
    CHAT,
    LOSS_MASK_SUFFIX,
    MAX_VAL_TOKENS,
    TOKENS,
    DataConfig,
    check_data_keys,
)
from fsdpctl.config.data_sources import sources_in
from fsdpctl.data.data_set import DataSet, check_same_tokenizer, mix
from fsdpctl.data.find_data import check_tokenizer_paths
from fsdpctl.data.new_tokens import open_run_tokenizer
from fsdpctl.data.open_chats import ChatSetup, open_chat_setup, open_chats
from fsdpctl.data.open_text import STDLIB, open_text
from fsdpctl.data.streams import concatenated
from fsdpctl.data.token_formats import TokenFile, open_token_files
from fsdpctl.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from fsdpctl.data.tokenizer_files import has_tokenizer
from fsdpctl.errors import UsageError

_PATH, _VAL_PATH = "data.path", "data.val_path"


def open_data(
    config: DataConfig,
    seed: int = 0,
    chat_opener: Callable[[ChatSetup, DataConfig, str], DataSet] = open_chats,
    text_opener: Callable[[Tokenizer, DataConfig, str], DataSet] = open_text,
) -> DataSet:
    """Open the data of a run; `seed` decides which documents share a sequence.

    `chat_opener` and `text_opener` open one source; their last argument is the setting of its path.
    UsageError if the data is missing, empty or corrupted, or if a setting doesn't apply to it.
    """
    check_data_keys(config)
    check_tokenizer_paths(config)
    if config.path is None and config.name != STDLIB:
        raise UsageError(f"data={config.name}: data.path is required: a file, directory or glob")
    open_one: Callable[[DataConfig, str], DataSet] = _from_token_files
    if config.name == CHAT:
        open_one = partial(chat_opener, open_chat_setup(config, seed))
    elif config.name != TOKENS:
        open_one = partial(text_opener, open_run_tokenizer(config))
    if config.name == STDLIB:
        return open_one(config, _PATH)
    if config.val_path is None:
        return _open(open_one, config, _PATH)
    one_source = replace(config, val_path=None, val_fraction=0.0)
    train, val = (
        _open(open_one, replace(one_source, path=path), key)
        for path, key in ((config.path, _PATH), (config.val_path, _VAL_PATH))
    )
    check_same_tokenizer(str(config.path), train, config.val_path, val)
    files, token_files = (*train.files, *val.files), (*train.token_files, *val.token_files)
    notes = tuple(dict.fromkeys((*train.notes, *val.notes)))
    return replace(
        train, val=val.train, files=files, token_files=token_files, has_val_files=True, notes=notes
    )


def _open(open_one: Callable[[DataConfig, str], DataSet], config: DataConfig, key: str) -> DataSet:
    sources = sources_in(str(config.path), key)
    if key == _VAL_PATH and any(each.share is not None for each in sources):
        raise UsageError(f"{key}={config.path}: shares are only valid in data.path")
    data_sets = [open_one(replace(config, path=each.path), key) for each in sources]
    return mix(sources, data_sets, key) if len(sources) > 1 else data_sets[0]


def _from_token_files(config: DataConfig, key: str) -> DataSet:
    path = str(config.path)
    isolates, validates = bool(config.packing), config.uses_validation_files
    opened = open_token_files(path, key, config.format, with_validation=validates)
    files, val_files = opened.train, opened.validation
    train = concatenated(files, path, isolates=isolates)
    val = concatenated(val_files, path, isolates=isolates) if val_files else None
    if val is None and config.used_val_fraction:
        count = train.num_tokens
        train, val = train.split(count - min(int(count * config.used_val_fraction), MAX_VAL_TOKENS))
    all_files = (*files, *val_files)
    if isolates and (unknown := next((x for x in all_files if x.shard.index is None), None)):
        problem = f"the format {unknown.format} does not record the ends of documents"
        raise UsageError(f"data.packing=true: {unknown.shard.path}: {problem}")
    tokenizer = _tokenizer_of(files[0])
    notes = tuple(dict.fromkeys(each.hint for each in all_files if each.hint))
    if any(each.shard.loss_mask is not None for each in all_files):
        notes += (f"the loss masks NAME{LOSS_MASK_SUFFIX} are used",)
    if config.tokenizer is not None:
        tokenizer = open_tokenizer(config.tokenizer)
        notes += _check_tokenizer(key, files[0], tokenizer)
    tokenizer_size = 0 if config.tokenizer is None else tokenizer.vocab_size
    summary = opened.files.summary(validates=validates)
    description = path if summary == "1 file" else f"{path}, {summary}"
    return DataSet(
        train, val, tokenizer=tokenizer, vocab_size=files[0].vocab_size or tokenizer_size,
        description=description, token_files=all_files, notes=notes, has_val_files=bool(val_files),
    )  # fmt: skip


def _tokenizer_of(file: TokenFile) -> Tokenizer:
    """Return the tokenizer of a file, or if it is unknown, a stand-in of another size."""
    if file.tokenizer_xxh3 is not None and has_tokenizer(Path(str(file.tokenizer))):
        tokenizer = open_tokenizer(file.tokenizer)
        if file.tokenizer_xxh3 == tokenizer.checksum:
            return tokenizer
    return ByteTokenizer()


def _check_tokenizer(key: str, file: TokenFile, tokenizer: Tokenizer) -> tuple[str, ...]:
    path = file.shard.path
    if file.tokenizer_xxh3 is None:
        named = "no tokenizer" if file.tokenizer is None else f"the tokenizer {file.tokenizer}"
        return (f"{path} ({file.format}) names {named}: read as tokens of {tokenizer.name}",)
    if file.tokenizer_xxh3 == tokenizer.checksum:
        return ()
    other = "an earlier version" if file.tokenizer == tokenizer.name else file.tokenizer
    raise UsageError(
        f"{key}={path}: expected tokens of the tokenizer {tokenizer.name}, got tokens of {other}; "
        f"run `fsdpctl tokenize SRC {path} --tokenizer {tokenizer.name} --overwrite`, or set "
        "model.init=random"
    )
