"""The settings of the model in `model.path`, or of a named one, and of `model.lora.path`."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fsdpctl.config.decoder_config import (
    SIZE_NAMES,
    model_type_in,
    read_configuration,
    sizes_and_config,
    with_other_sizes,
)
from fsdpctl.config.gguf_model import config_of_gguf
from fsdpctl.config.hub import hub_models, local_model
from fsdpctl.config.keys import Value
from fsdpctl.config.model import NO_DECODER, SCRIPT_PREFIX
from fsdpctl.config.overrides import OVERRIDES_KEY, apply_overrides, read_run_config
from fsdpctl.config.peft import ADAPTER_KEYS, adapter_settings, has_adapters
from fsdpctl.config.schema import KEYS
from fsdpctl.config.serialize import known_key
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.io.checksummed_json import read_checksummed
from fsdpctl.io.files import nearest_path_hint
from fsdpctl.io.gguf_header import is_gguf
from fsdpctl.io.packages import package_folder
from fsdpctl.io.run_files import CHECKPOINTS, CONFIG_JSON, MANIFEST, RUN_CONFIG
from fsdpctl.io.untrusted import as_type, parse_json, read_json

CONFIG_JSON_KEY = "model.config_json"
_SIZES = tuple(f"model.{name}" for name in SIZE_NAMES)
_DROPOUT = "model.lora.dropout"
_FREE = "model.max_seq_len"  # which weights do not determine
HF_OPTION = "hf"  # the option for a model that a directory describes
LORA_KEYS = (
    "model.lora.rank", "model.lora.alpha", "model.lora.rslora", "model.lora.targets",
    "model.base_dtype",
)  # fmt: skip
# Settings of the run that saved a model, not of the model.
_RUN_KEYS = (
    "model.path", "model.init", "model.overrides", "model.trainable", "model.lora.path",
    "model.attention", "model.first_new_token",
)  # fmt: skip


def fetch_model_config(
    pairs: list[tuple[str, str]], *, for_training: bool
) -> list[tuple[str, str]]:
    """Replace a name on the Hub in `model.path` by a directory with its configuration.

    Unless it is `of_run`, one that is in the table keeps its name: estimates need no more.
    """
    if dict(pairs).get("model") != HF_OPTION:
        return pairs
    return [
        (
            name,
            local_model(text, "config", table=not for_training) if name == "model.path" else text,
        )
        for name, text in pairs
    ]


def model_values(
    choices: Mapping[str, str], given: Mapping[str, str], named: Value
) -> dict[str, Value]:
    """Return the settings of the model in `model.path`, or in the file `named` in conf/model."""
    path, option = given.get("model.path"), choices.get("model")
    if option == HF_OPTION:
        if path is None:
            raise UsageError(f"model={option}: model.path is required, such as model.path=DIR")
        file, where = Path(str(KEYS["model.path"].parse(path))), f"model.path={path}"
        words = model_settings(str(file))
    else:
        for name in ("path", "init"):
            if given.get(f"model.{name}") not in (None, "auto", "random"):
                problem = f"only valid with model={HF_OPTION}"
                raise UsageError(f"model.{name}={given[f'model.{name}']}: {problem}")
        file = package_folder("conf") / "model" / str(named)
        words, where = settings_of_file(file), f"model={file.stem}"
    is_random = option != HF_OPTION or given.get("model.init") == "random"
    changed = {**words, **_changed(words, given, where)}
    try:
        values = {name: known_key(name).parse(text) for name, text in changed.items()}
    except UsageError as error:
        refusal = CheckpointError if is_checkpoint(file) else UsageError
        raise refusal(f"{where}: {error}") from None
    if not is_random:
        _check_weights(given, words, changed, where)
    _check_sizes(given, values, where)
    if option != HF_OPTION and "vocab_size" not in json.loads(str(values[CONFIG_JSON_KEY])):
        values["model.vocab_size"] = None  # that of the data
    return values


def _changed(words: Mapping[str, str], given: Mapping[str, str], where: str) -> dict[str, str]:
    content = parse_json(words[CONFIG_JSON_KEY], dict[str, Any], f"{where}: {CONFIG_JSON_KEY}")
    sizes = {name: KEYS[name].parse(given[name]) for name in _SIZES if name in given}
    if not sizes and OVERRIDES_KEY not in given:
        return {}
    sizes = {name.removeprefix("model."): value for name, value in sizes.items()}
    content = with_other_sizes(content, sizes, where)
    if OVERRIDES_KEY in given:
        content = apply_overrides(
            content, str(KEYS[OVERRIDES_KEY].parse(given[OVERRIDES_KEY])), where
        )
        where = f"{where}, {OVERRIDES_KEY}"
    found = sizes_and_config(content, where)
    return {f"model.{name}": text for name, text in found.items()}


def _check_weights(
    given: Mapping[str, str], words: Mapping[str, str], changed: Mapping[str, str], where: str
) -> None:
    of_lora = LORA_KEYS if "model.lora.rank" in words else ()
    # Of a run that has added rows to the embeddings.
    free = (_FREE, "model.vocab_size") if "model.first_new_token" in given else (_FREE,)
    for name in (*(each for each in _SIZES if each not in free), *of_lora):
        text, known = {**changed, **given}.get(name, ""), words.get(name)
        value = KEYS[name].default if known is None else KEYS[name].parse(known)
        if text and value != KEYS[name].parse(text):
            raise UsageError(
                f"{name}={text}: conflicts with the weights in {where} of "
                f"{known or 'another value'}; set model.init=random to ignore them"
            )


def _check_sizes(given: Mapping[str, str], values: Mapping[str, Value], where: str) -> None:
    family = model_type_in(str(values[CONFIG_JSON_KEY]))
    for name in _SIZES:
        wanted = KEYS[name].parse(given[name]) if name in given else None
        if wanted is not None and values.get(name) != wanted:
            raise UsageError(f"{name}={given[name]}: {where}: {family} has no such size")
    names = ("num_heads", "num_kv_heads", "head_dim")
    heads, groups, width = (int(str(values.get(f"model.{name}") or 0)) for name in names)
    if "model.num_kv_heads" in given and heads % groups:
        raise UsageError(f"model.num_kv_heads={groups}: must divide the {heads} heads of num_heads")
    if width % 2 and any(name in given for name in _SIZES):
        raise UsageError(f"model.head_dim={width}: rotary embeddings need an even width")
    if CONFIG_JSON_KEY in given:  # of a run, which may name what others leave out
        texts = (given[CONFIG_JSON_KEY], str(values[CONFIG_JSON_KEY]))
        one, other = (parse_json(text, dict[str, Any], CONFIG_JSON_KEY) for text in texts)
        if read_configuration(one, CONFIG_JSON_KEY) != read_configuration(other, where):
            raise UsageError(f"{CONFIG_JSON_KEY}: not that of {where}; leave it out")


def adapter_values(
    choices: Mapping[str, str], given: Mapping[str, str], typed: Collection[str]
) -> dict[str, Value]:
    """Return the settings of the adapters in `model.lora.path`, if it is set.

    They replace those of a recipe, except for the dropout, and conflict with `typed` ones.
    """
    path = given.get("model.lora.path")
    if path is None:
        return {}
    if choices.get("model") != HF_OPTION:
        raise UsageError(f"model.lora.path={path}: only valid with model={HF_OPTION}")
    words = adapter_settings(str(KEYS["model.lora.path"].parse(path)))
    try:
        values = {name: KEYS[name].parse(text) for name, text in words.items()}
    except UsageError as error:
        raise UsageError(f"model.lora.path={path}: {error}") from None
    for name in ADAPTER_KEYS:
        if name in typed and values[name] != KEYS[name].parse(given[name]):
            raise UsageError(f"{name}={given[name]}: model.lora.path={path} has {words[name]}")
    kept = {*typed, _DROPOUT} & given.keys()
    return {name: value for name, value in values.items() if name not in kept}


def model_settings(path: str) -> dict[str, str]:
    """Return the settings (`model.KEY`) of a Hugging Face directory, GGUF file, run or checkpoint.

    Args:
        path: The directory or file, or the name on the Hub of a published model for estimates.

    Raises:
        UsageError: If the directory has no model, or one that isn't supported.
    """
    folder = Path(path)
    if not folder.is_dir():
        entry = hub_models().get(path.partition("@")[0])
        if entry is None:
            if is_gguf(folder):
                return _prefixed(sizes_and_config(config_of_gguf(folder), path))
            if folder.exists():
                raise UsageError(f"model.path={path}: expected a directory or a .gguf file")
            raise UsageError(f"model.path={path}: no such directory{nearest_path_hint(path)}")
        return _prefixed(sizes_and_config(entry["config"], path))
    if is_hugging_face(folder):
        return settings_of_file(folder / CONFIG_JSON)
    ours = _words_of_ours(folder)
    if str(ours.get("model")).startswith(SCRIPT_PREFIX):
        raise UsageError(f"model.path={path}: {NO_DECODER}")
    words = {
        name: str(text)
        for name, text in ours.items()
        if name.startswith("model.") and name not in _RUN_KEYS
    }
    if not words and has_adapters(folder):
        way = f"set model.path to the model that they were trained on, and model.lora.path={path}"
        raise UsageError(f"model.path={path}: adapters without a model; {way}")
    if not words:
        problem = f"no model found; expected {CONFIG_JSON}, a run, or a checkpoint"
        raise UsageError(f"model.path={path}: {problem}")
    if CONFIG_JSON_KEY not in words:
        problem = "model.config_json: missing; written by another version"
        raise UsageError(f"model.path={path}: {problem}")
    return words


def settings_of_file(file: Path) -> dict[str, str]:
    return _prefixed(sizes_and_config(read_json(file, dict[str, Any]), str(file)))


def _prefixed(words: dict[str, str]) -> dict[str, str]:
    return {f"model.{name}": text for name, text in words.items()}


def is_hugging_face(folder: Path) -> bool:
    """Return whether it is a GGUF file or directory of a model, rather than a run or checkpoint."""
    if is_gguf(folder):
        return True
    return (folder / CONFIG_JSON).is_file() and not _words_of_ours(folder, above=False)


def is_checkpoint(folder: Path) -> bool:
    """Return whether a directory is a checkpoint, even if files are missing."""
    return (folder / MANIFEST).exists() and (
        any(folder.glob("rank-*.safetensors")) or not (folder / CONFIG_JSON).is_file()
    )


def _words_of_ours(folder: Path, *, above: bool = True) -> dict[str, Any]:
    """Return the settings of a run or checkpoint; `above`: also of the directory `checkpoints`."""
    if is_checkpoint(folder):
        words = read_checksummed(folder).get("config", {})
        where = f"{folder / MANIFEST}: corrupted"
        return {"of": MANIFEST, **as_type(words, dict[str, str], where, CheckpointError)}
    places = [folder, folder.parent] if above else [folder]
    for file in (place / RUN_CONFIG for place in places):
        if file.is_file() and (file.parent / CHECKPOINTS).is_dir():
            return read_run_config(file)
    return {}
