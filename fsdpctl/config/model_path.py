"""Settings that follow from files: of `model.path`, of a named model, of `model.lora.path`."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fsdpctl.config.decoder_config import SIZE_NAMES, read_hf_config, resize, sizes_and_config
from fsdpctl.config.gguf_model import config_of_gguf
from fsdpctl.config.hub import hub_models, local_model
from fsdpctl.config.keys import AUTO, Setting, Settings, Value
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

_NOT_IN_WEIGHTS = "model.max_seq_len"  # the only size that no shape of a weight has
HF_OPTION = "hf"  # the option for a model in `model.path`
# Keys that must match the stored weights of a run with LoRA.
LORA_KEYS = (
    "model.lora.rank", "model.lora.alpha", "model.lora.rslora", "model.lora.targets",
    "model.base_dtype",
)  # fmt: skip
# Settings of the run that saved a model, which do not describe the model.
_RUN_KEYS = (
    "model.path", "model.init", "model.overrides", "model.trainable", "model.lora.path",
    "model.attention", "model.first_new_token",
)  # fmt: skip


def fetch_model_config(pairs: list[Setting], *, for_training: bool) -> list[Setting]:
    """Replace a name on the Hub in `model.path` by the directory with its config.json.

    Without `for_training`, a name in the table of models stays, since the table has the sizes.
    """
    if dict(pairs).get("model") != HF_OPTION:
        return pairs
    fetch = partial(local_model, part="config", allow_table=not for_training)
    return [(name, fetch(text) if name == "model.path" else text) for name, text in pairs]


def model_values(choices: Settings, settings: Settings, file_name: Value) -> dict[str, Value]:
    """Return the settings of the model in `model.path`, or of a file in conf/model.

    `file_name` is the value of model.config_json in the option of another model. `settings` are
    those that are set; they may change sizes of a model without weights.
    """
    path, option = settings.get("model.path"), choices.get("model")
    if option == HF_OPTION:
        if path is None:
            raise UsageError(f"model={option}: model.path is required, such as model.path=DIR")
        file, location = Path(str(KEYS["model.path"].parse(path))), f"model.path={path}"
        stored = model_settings(str(file))
    else:
        # Other models have random weights: a path or other initial weights would be ignored.
        for name in ("model.path", "model.init"):
            if settings.get(name) not in (None, AUTO, "random"):
                raise UsageError(f"{name}={settings[name]}: only valid with model={HF_OPTION}")
        file = package_folder("conf") / "model" / str(file_name)
        stored = sizes_and_config(read_json(file, dict[str, Any]), str(file))
        location = f"model={file.stem}"
    merged = {**stored, **_changed(stored, settings, location)}
    try:
        values = {name: known_key(name).parse(text) for name, text in merged.items()}
    except UsageError as error:
        refusal = CheckpointError if is_checkpoint(file) else UsageError
        raise refusal(f"{location}: {error}") from None
    if option == HF_OPTION and settings.get("model.init") != "random":
        _check_stored(settings, stored, merged, location)
    _check_sizes(settings, values, location)
    if option != HF_OPTION and "vocab_size" not in json.loads(str(values[CONFIG_JSON_KEY])):
        values["model.vocab_size"] = None  # follows from the data
    return values


def _changed(stored: Settings, settings: Settings, location: str) -> dict[str, str]:
    """Return the settings of the model that follow from set sizes and overrides."""
    content = parse_json(stored[CONFIG_JSON_KEY], dict[str, Any], f"{location}: {CONFIG_JSON_KEY}")
    set_sizes = [name for name in SIZE_NAMES if f"model.{name}" in settings]
    sizes = {x: KEYS[f"model.{x}"].parse(settings[f"model.{x}"]) for x in set_sizes}
    overrides = settings.get(OVERRIDES_KEY)
    if not sizes and overrides is None:
        return {}
    content = resize(content, sizes, location)
    if overrides is not None:
        content = apply_overrides(content, str(KEYS[OVERRIDES_KEY].parse(overrides)), location)
        location = f"{location}, {OVERRIDES_KEY}"
    return sizes_and_config(content, location)


def _check_stored(settings: Settings, stored: Settings, merged: Settings, location: str) -> None:
    """Refuse settings that conflict with the stored weights."""
    lora_keys = LORA_KEYS if "model.lora.rank" in stored else ()
    # With new tokens, this run has more rows than the stored embeddings.
    resized = "model.vocab_size" if "model.first_new_token" in settings else ""
    for name in (*(x for x in _SIZES if x not in (_NOT_IN_WEIGHTS, resized)), *lora_keys):
        text, stored_text = {**merged, **settings}.get(name, ""), stored.get(name)
        value = KEYS[name].default if stored_text is None else KEYS[name].parse(stored_text)
        if text and value != KEYS[name].parse(text):
            problem = f"the weights in {location}, which have {stored_text or 'another value'}"
            next_step = "set model.init=random to ignore them"
            raise UsageError(f"{name}={text}: conflicts with {problem}; {next_step}")


def _check_sizes(settings: Settings, values: Mapping[str, Value], location: str) -> None:
    config_json = parse_json(str(values[CONFIG_JSON_KEY]), dict[str, Any], CONFIG_JSON_KEY)
    for name in _SIZES:
        requested = KEYS[name].parse(settings[name]) if name in settings else None
        if requested is not None and values.get(name) != requested:
            problem = f"{config_json['model_type']} has no such size"
            raise UsageError(f"{name}={settings[name]}: {location}: {problem}")
    names = ("num_heads", "num_kv_heads", "head_dim")
    heads, kv_heads, width = (int(str(values.get(f"model.{name}") or 0)) for name in names)
    if "model.num_kv_heads" in settings and heads % kv_heads:
        problem = f"must divide the {heads} heads of num_heads"
        raise UsageError(f"model.num_kv_heads={kv_heads}: {problem}")
    if width % 2 and any(name in settings for name in _SIZES):
        raise UsageError(f"model.head_dim={width}: rotary embeddings need an even width")
    if CONFIG_JSON_KEY in settings:  # a run's config.json may spell out defaults
        stored = parse_json(settings[CONFIG_JSON_KEY], dict[str, Any], CONFIG_JSON_KEY)
        if read_hf_config(stored, CONFIG_JSON_KEY) != read_hf_config(config_json, location):
            problem = f"differs from that of {location}; leave {CONFIG_JSON_KEY} out"
            raise UsageError(f"{CONFIG_JSON_KEY}: {problem}")


def adapter_values(choices: Settings, settings: Settings, typed_keys: set[str]) -> dict[str, Value]:
    """Return the settings of the adapters in `model.lora.path`, if it is set.

    These replace a recipe's settings, except the dropout. UsageError if a key in `typed_keys` has
    another value on the command line.
    """
    path = settings.get("model.lora.path")
    if path is None:
        return {}
    if choices.get("model") != HF_OPTION:
        raise UsageError(f"model.lora.path={path}: only valid with model={HF_OPTION}")
    stored = adapter_settings(str(KEYS["model.lora.path"].parse(path)))
    try:
        values = {name: KEYS[name].parse(text) for name, text in stored.items()}
    except UsageError as error:
        raise UsageError(f"model.lora.path={path}: {error}") from None
    for name in ADAPTER_KEYS:
        if name in typed_keys and values[name] != KEYS[name].parse(settings[name]):
            raise UsageError(f"{name}={settings[name]}: model.lora.path={path} has {stored[name]}")
    set_keys = {*typed_keys, "model.lora.dropout"} & settings.keys()
    return {name: value for name, value in values.items() if name not in set_keys}


def model_settings(path: str) -> dict[str, str]:
    """Return the settings (`model.KEY`) of a Hugging Face directory, GGUF file, run or checkpoint.

    For estimates, `path` may be the name of a published model on the Hub. UsageError if `path` has
    no model, or one that isn't supported.
    """
    folder = Path(path)
    if not folder.is_dir():
        if (entry := hub_models().get(path.partition("@")[0])) is not None:
            return sizes_and_config(entry["config"], path)
        if is_gguf(folder):
            return sizes_and_config(config_of_gguf(folder), path)
        problem = f"no such directory{nearest_path_hint(path)}"
        problem = "expected a directory or a .gguf file" if folder.exists() else problem
        raise UsageError(f"model.path={path}: {problem}")
    if is_foreign_model(folder):
        file = folder / CONFIG_JSON
        return sizes_and_config(read_json(file, dict[str, Any]), str(file))
    stored = _stored_settings(folder)
    if str(stored.get("model")).startswith(SCRIPT_PREFIX):
        raise UsageError(f"model.path={path}: {NO_DECODER}")
    model_keys = [x for x in stored if x.startswith("model.") and x not in _RUN_KEYS]
    settings = {name: str(stored[name]) for name in model_keys}
    if not settings and has_adapters(folder):
        advice = f"set model.path to their base model, and model.lora.path={path}"
        raise UsageError(f"model.path={path}: adapters without a model; {advice}")
    if not settings:
        expected = f"{CONFIG_JSON}, a run, or a checkpoint"
        raise UsageError(f"model.path={path}: no model found; expected {expected}")
    if CONFIG_JSON_KEY not in settings:
        raise UsageError(f"model.path={path}: no {CONFIG_JSON_KEY}; written by another version")
    return settings


def is_foreign_model(path: Path) -> bool:
    """Return whether a path is a GGUF file or a directory of transformers, not of fsdpctl."""
    has_config = (path / CONFIG_JSON).is_file()
    return is_gguf(path) or (has_config and not _stored_settings(path, above=False))


def is_checkpoint(folder: Path) -> bool:
    """Return whether a directory is a checkpoint, even if files are missing."""
    return (folder / MANIFEST).exists() and (
        any(folder.glob("rank-*.safetensors")) or not (folder / CONFIG_JSON).is_file()
    )


def _stored_settings(folder: Path, *, above: bool = True) -> dict[str, Any]:
    """Return the settings in a run or checkpoint, or an empty mapping.

    With `above`, `folder` may be the directory `checkpoints` of a run.
    """
    if is_checkpoint(folder):
        settings = read_checksummed(folder).get("config", {})
        location = f"{folder / MANIFEST}: corrupted"
        # The key "of" makes the settings of a checkpoint true even if the manifest has none.
        return {"of": MANIFEST, **as_type(settings, dict[str, str], location, CheckpointError)}
    folders = [folder, folder.parent] if above else [folder]
    for file in (each / RUN_CONFIG for each in folders):
        if file.is_file() and (file.parent / CHECKPOINTS).is_dir():
            return read_run_config(file)
    return {}
