"""The data of a run: opening it, checks against the configuration, and notes."""

import os
from collections.abc import Sequence
from glob import glob
from typing import Any

from fsdpctl.config.data import DataConfig
from fsdpctl.config.data_sources import absolute_paths, sources_in
from fsdpctl.config.schema import Config, ConfigT
from fsdpctl.data.data_set import DataSet, contents_of
from fsdpctl.data.find_data import HUB, is_cached
from fsdpctl.data.open_data import open_data
from fsdpctl.data.open_estimated import open_estimated
from fsdpctl.data.packing import PackedSamples
from fsdpctl.data.token_formats import TokenFile, check_tokens
from fsdpctl.errors import UsageError

_CHECKED_BYTES = 1 << 30  # token files up to this size in all are checked at each start
# With fewer than _LEAST_SAMPLES of _LEAST_LENGTH tokens, train.seq_len must be set.
_LEAST_SAMPLES, _LEAST_LENGTH = 100, 16
_MANY_EPOCHS = 100
_LEAST_TOKENS = _LEAST_SAMPLES * _LEAST_LENGTH
DATE_KEY = "data.date"  # the hash of a run excludes it: resuming on another day is the same run


def open_checked_data(config: Config) -> DataSet:
    """Open the data of a run, and check token files unless they are too large."""
    data = open_data(config.data, config.train.seed)
    for file in data.token_files if are_small(data.token_files) else ():
        if file.is_local:
            check_tokens(file, config.model.vocab_size)
    check_validation(config, data)
    return data


def open_estimated_data(config: Config) -> DataSet:
    """Open the data of an estimate, with counted or estimated tokens; nothing is fetched."""
    data = open_estimated(config.data, config.train.seed)
    check_validation(config, data)
    return data


def check_validation(config: Config, data: DataSet) -> None:
    """Refuse settings that compare validation losses if there is no validation data."""
    if data.val is None and config.compares_losses:
        key = "train.patience" if config.train.patience else "checkpoint.keep_best"
        keys = "data.val_fraction or data.val_path"
        keys = "val_data" if config.model.is_script_module else keys
        raise UsageError(f"{key}: requires validation data; set {keys}")


def are_small(files: Sequence[TokenFile]) -> bool:
    """Return whether token files are small enough to check at each start, in about a second."""
    return sum(each.size for each in files if each.is_local) <= _CHECKED_BYTES


def check_amount(config: Config, data: DataSet) -> None:
    """Refuse train.seq_len=auto for data with so few tokens that the length should be set."""
    count = data.train.num_tokens
    if count >= _LEAST_TOKENS:
        return
    cause = ""
    if data.val is not None and not data.has_val_files:
        held_out, share = data.val.num_tokens, config.data.used_val_fraction
        cause = f" (data.val_fraction={share:g} keeps {held_out:,} more for validation)"
    raise UsageError(
        f"data.path={config.data.path}: {count:,} tokens are too few to train on{cause}; expected "
        f"at least {_LEAST_TOKENS:,}, {_LEAST_SAMPLES} samples of {_LEAST_LENGTH}; to train on "
        "this data nevertheless, set train.seq_len"
    )


def vocabulary_of(config: Config, data: DataSet) -> int:
    """Return the vocabulary size of the model, else of the data; UsageError if both are unknown."""
    if size := config.model.vocab_size or data.vocab_size:
        return size
    problem = "vocabulary unknown; set model.vocab_size, or data.tokenizer=DIR"
    raise UsageError(f"data.path={config.data.path}: {problem}")


def with_data(config: ConfigT, data: DataSet) -> ConfigT:
    """Return the configuration with the tokenizer of the data, and absolute paths.

    UsageError if the vocabulary of the model is smaller than that of the data.
    """
    if (vocab_size := vocabulary_of(config, data)) < data.vocab_size:
        problem = f"smaller than the vocabulary of the data, {data.vocab_size}"
        raise UsageError(f"model.vocab_size={vocab_size}: {problem}")
    settings, name = config.data, data.tokenizer.name
    values: dict[str, Any] = {
        key: absolute_paths(value, key)
        for key in ("data.path", "data.val_path")
        if (value := config.value(key)) is not None
    }
    if settings.template is not None:
        values["data.template"] = os.path.abspath(settings.template)
    if data.has_text:  # the tokenizer of token files is unknown
        values["data.tokenizer"] = name if name == "bytes" else os.path.abspath(name)
    return config.changed(values)


def notes_on_data(config: Config, data: DataSet) -> tuple[str, ...]:
    """Return notes about the data, also about packed sequences of `train.seq_len`."""
    length = config.train.seq_len
    samples = [each.samples(length) for each in contents_of(data.train)]
    packed = [each for each in samples if isinstance(each, PackedSamples)]
    if not packed:
        return data.notes
    count, num_tokens = sum(map(len, packed)), sum(each.num_tokens for each in packed)
    padding = 1 - num_tokens / (count * length) if count else 0.0
    text = f"{count:,} packed sequences of {length:,} tokens, {padding:.1%} padding"
    if too_long := sum(each.num_too_long for each in packed):
        action = "truncated" if config.data.too_long == "truncate" else "dropped"
        text += f"; {too_long:,} samples are longer: {action} (data.too_long)"
    if untrained := sum(each.num_untrained for each in packed):
        text += f"; {untrained:,} dropped, with no trained token within train.seq_len"
    return (*data.notes, text)


def notes_on_epochs(config: Config, data: DataSet, steps: int) -> tuple[str, ...]:
    """Return a line if a run reads its data many times, unless `train.epochs` is set."""
    samples = len(data.train.samples(config.train.seq_len))
    epochs = steps * config.train.global_batch_size / max(samples, 1)
    if config.train.epochs is not None or epochs < _MANY_EPOCHS:
        return ()
    return (f"{steps:,} steps read the data's {samples:,} samples {epochs:,.0f} times",)


def is_data_here(data: DataConfig) -> bool:
    """Return whether all files of the data are on this machine."""
    texts = {"data.path": data.path, "data.val_path": data.val_path}
    paths = [x.path for key, text in texts.items() if text for x in sources_in(text, key)]
    are_here = (is_cached(x) if x.startswith(HUB) else glob(x) or os.path.exists(x) for x in paths)
    return bool(paths) and all(are_here)
