"""The model in the directory `model.path`."""

import json
from pathlib import Path
from typing import Any

from fsdpctl.config.any_decoder import TRANSFORMERS, transformers_words, transformers_words_of
from fsdpctl.config.hub_cache import local_model
from fsdpctl.config.hub_models import hub_config
from fsdpctl.config.hugging_face import CONFIG_JSON, config_json, model_words_of, words_of_content
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.peft import has_adapters
from fsdpctl.config.recipe import read_recipe
from fsdpctl.config.schema import KEYS
from fsdpctl.config.sealed import MANIFEST, read_sealed
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.io.documents import as_type
from fsdpctl.io.run_files import CHECKPOINTS as CHECKPOINTS
from fsdpctl.io.run_files import RUN_CONFIG as RUN_CONFIG

# Settings of a model that its weights determine.
SHAPE_KEYS = tuple(
    f"model.{name}"
    for name in (
        "architecture", "num_layers", "hidden_size", "intermediate_size", "num_heads",
        "num_kv_heads", "head_dim", "vocab_size", "attention_bias", "mlp_bias",
    )
)  # fmt: skip
LORA_KEYS = (
    "model.lora.rank", "model.lora.alpha", "model.lora.rslora", "model.lora.targets",
    "model.base_dtype",
)  # fmt: skip
# Settings of the run that saved a model, not of the model.
_NOT_THE_MODELS = (
    "model.path", "model.init", "model.trainable", "model.lora.path", "model.attention"
)  # fmt: skip


def model_words(path: str, *, by_transformers: bool = False) -> dict[str, str]:
    """Return the settings (`model.KEY`) of a Hugging Face directory, a run, or a checkpoint.

    Args:
        path: The directory, or the name on the Hub of a published model for estimates.
        by_transformers: Whether transformers' module is to run the model, rather than our own.

    Raises:
        UsageError: If the directory has no model, or one that isn't supported.
    """
    folder = Path(path)
    if not folder.is_dir():
        content = hub_config(path)
        if content is None:
            local_model(path)  # raises for a name on the Hub, with the command to download it
            raise UsageError(f"model.path={path}: no such directory")
        read = transformers_words if by_transformers else words_of_content
        return {f"model.{name}": text for name, text in read(content, path).items()}
    if is_hugging_face(folder):
        file = folder / CONFIG_JSON
        found = transformers_words_of(file) if by_transformers else model_words_of(file)
        return {f"model.{name}": text for name, text in found.items()}
    words = {
        name: str(text)
        for name, text in _words_of_ours(folder).items()
        if name.startswith("model.") and name not in _NOT_THE_MODELS
    }
    if not words and has_adapters(folder):
        raise UsageError(
            f"model.path={path}: adapters without a model; set model.path to the model that they "
            f"were trained on, and model.lora.path={path}"
        )
    if not words:
        raise UsageError(
            f"model.path={path}: no model found; expected {CONFIG_JSON}, a run, or a checkpoint"
        )
    is_transformers = words.get("model.architecture") == TRANSFORMERS
    return words if is_transformers == by_transformers else _converted(words, path)


def _converted(words: dict[str, str], path: str) -> dict[str, str]:
    """Convert the settings of a run between our own module and that of transformers."""
    where = f"model.path={path}"
    lora = {name: text for name, text in words.items() if name in LORA_KEYS}
    if words.get("model.architecture") == TRANSFORMERS:
        found = words_of_content(json.loads(words["model.config_json"]), where)
    else:
        values = {name: KEYS[name].parse(text) for name, text in words.items()}
        own = ModelConfig(
            **{
                name.removeprefix("model."): value
                for name, value in values.items()
                if name.count(".") == 1
            }  # type: ignore[arg-type]  # parsed by their keys
        )
        found = transformers_words(config_json(own, "float32", {}), where)
    return {f"model.{name}": text for name, text in found.items()} | lora


def option_of(path: str) -> str:
    """Return the option of `model` that runs the model in a directory: hf if both can.

    Raises:
        UsageError: If the directory has no model, or one that isn't supported.
    """
    try:
        model_words(path)
    except UsageError:
        model_words(path, by_transformers=True)
        return TRANSFORMERS
    words = _words_of_ours(Path(path))
    return TRANSFORMERS if words.get("model.architecture") == TRANSFORMERS else "hf"


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
