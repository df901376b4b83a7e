"""The model in `model.path`, and the adapters in `model.lora.path`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdpctl.config.hub_cache import local_model
from fsdpctl.config.hugging_face import CONFIG_JSON, model_words_of
from fsdpctl.config.keys import Value
from fsdpctl.config.peft import ADAPTER_KEYS, adapter_words
from fsdpctl.config.recipe import read_recipe
from fsdpctl.config.schema import KEYS
from fsdpctl.config.sealed import MANIFEST, read_sealed
from fsdpctl.config.serialize import known_key
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.io.documents import as_type

RUN_CONFIG = "config.yaml"  # of a run
CHECKPOINTS = "checkpoints"
# Settings of a model that its weights determine.
SHAPE_KEYS = tuple(
    f"model.{name}"
    for name in (
        "architecture", "num_layers", "hidden_size", "intermediate_size", "num_heads",
        "num_kv_heads", "head_dim", "vocab_size", "attention_bias", "mlp_bias",
    )
)  # fmt: skip
LORA_KEYS = ("model.lora.rank", "model.lora.alpha", "model.lora.rslora", "model.lora.targets")
# Settings of the run that saved a model, not of the model.
_NOT_THE_MODELS = (
    "model.path", "model.init", "model.trainable", "model.lora.path", "model.attention"
)  # fmt: skip


def model_words(path: str) -> dict[str, str]:
    """Return the settings (`model.KEY`) of a Hugging Face directory, a run, or a checkpoint.

    Raises:
        UsageError: If the directory has no model, or one that isn't supported.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"model.path={path}: no such directory")
    if is_hugging_face(folder):
        file = folder / CONFIG_JSON
        return {f"model.{name}": text for name, text in model_words_of(file).items()}
    words = {
        name: str(text)
        for name, text in _words_of_ours(folder).items()
        if name.startswith("model.") and name not in _NOT_THE_MODELS
    }
    if not words:
        raise UsageError(
            f"model.path={path}: no model found; expected {CONFIG_JSON}, a run, or a checkpoint"
        )
    return words


def is_hugging_face(folder: Path) -> bool:
    """Return whether a directory has a config.json, and isn't a run or checkpoint."""
    return (folder / CONFIG_JSON).is_file() and not _words_of_ours(folder, above=False)


def is_checkpoint(folder: Path) -> bool:
    """Return whether a directory is a checkpoint, even if files are missing."""
    return (folder / MANIFEST).exists() and (
        any(folder.glob("rank-*.safetensors")) or not (folder / CONFIG_JSON).is_file()
    )


def _words_of_ours(folder: Path, *, above: bool = True) -> dict[str, Any]:
    """Return the settings of a run or checkpoint; `above`: also of the directory `checkpoints`."""
    if is_checkpoint(folder):
        words = read_sealed(folder).get("config", {})
        where = f"{folder / MANIFEST}: corrupted"
        return {"of": MANIFEST, **as_type(words, dict[str, str], where, CheckpointError)}
    places = [folder, folder.parent] if above else [folder]
    for file in (place / RUN_CONFIG for place in places):
        if file.is_file() and (file.parent / CHECKPOINTS).is_dir():
            return dict(read_recipe(file))
    return {}


FROM_PATH = "hf"  # the option for a model that a directory describes


def with_model(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Replace a name on the Hub in `model.path` by its cached directory."""
    given = dict(pairs)
    if given.get("model") != FROM_PATH:
        return pairs
    weights = given.get("model.init") != "random"
    return [
        (name, local_model(text, weights=weights) if name == "model.path" else text)
        for name, text in pairs
    ]


def values_of_path(choices: Mapping[str, str], given: Mapping[str, str]) -> dict[str, Value]:
    """Return the settings of the model in `model.path` if `model=hf`."""
    path = given.get("model.path")
    if choices.get("model") != FROM_PATH:
        for name in ("path", "init"):
            if given.get(f"model.{name}") not in (None, "auto", "random"):
                raise UsageError(
                    f"model.{name}={given[f'model.{name}']}: only valid with model={FROM_PATH}"
                )
        return {}
    if path is None:
        raise UsageError(f"model={FROM_PATH}: model.path is required, such as model.path=DIR")
    folder = str(KEYS["model.path"].parse(path))
    words = model_words(folder)
    try:
        values = {name: known_key(name).parse(text) for name, text in words.items()}
    except UsageError as error:
        refusal = CheckpointError if is_checkpoint(Path(folder)) else UsageError
        raise refusal(f"model.path={path}: {error}") from None
    fixed = SHAPE_KEYS + (LORA_KEYS if "model.lora.rank" in words else ())
    for name in fixed if given.get("model.init") != "random" else ():
        if name in given and values.get(name, KEYS[name].default) != KEYS[name].parse(given[name]):
            raise UsageError(
                f"{name}={given[name]}: conflicts with the weights in model.path={path} of "
                f"{words.get(name, 'another value')}; set model.init=random to ignore them"
            )
    return values


def values_of_adapters(choices: Mapping[str, str], given: Mapping[str, str]) -> dict[str, Value]:
    """Return the settings of the adapters in `model.lora.path`, if it is set."""
    path = given.get("model.lora.path")
    if path is None:
        return {}
    if choices.get("model") != FROM_PATH:
        raise UsageError(f"model.lora.path={path}: only valid with model={FROM_PATH}")
    words = adapter_words(str(KEYS["model.lora.path"].parse(path)))
    try:
        values = {name: KEYS[name].parse(text) for name, text in words.items()}
    except UsageError as error:
        raise UsageError(f"model.lora.path={path}: {error}") from None
    for name in ADAPTER_KEYS:
        if name in given and values[name] != KEYS[name].parse(given[name]):
            raise UsageError(f"{name}={given[name]}: model.lora.path={path} has {words[name]}")
    return values
