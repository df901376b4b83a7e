"""The model in the directory `model.path`."""

from pathlib import Path
from typing import Any

from fsdpctl.config.any_decoder import content_of, words_of_content, words_of_table
from fsdpctl.config.hub_cache import local_model
from fsdpctl.config.hub_models import hub_models
from fsdpctl.config.hugging_face import CONFIG_JSON, OWN_KEYS
from fsdpctl.config.model import TRANSFORMERS, ModelConfig
from fsdpctl.config.peft import has_adapters
from fsdpctl.config.recipe import read_recipe
from fsdpctl.config.sealed import MANIFEST, read_sealed
from fsdpctl.config.serialize import known_key
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.io.files import nearest_path
from fsdpctl.io.run_files import CHECKPOINTS as CHECKPOINTS
from fsdpctl.io.run_files import RUN_CONFIG as RUN_CONFIG
from fsdpctl.io.untrusted import as_type, read_json

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
# Settings that a config.json determines for a decoder of transformers.
CONFIG_KEYS = tuple(
    f"model.{name}"
    for name in (
        "architecture", "config_json", "num_layers", "hidden_size", "intermediate_size",
        "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_seq_len", "init_std",
        "tie_embeddings", "attention_bias", "mlp_bias", *OWN_KEYS,
    )
)  # fmt: skip
# Settings of the run that saved a model, not of the model.
_NOT_THE_MODELS = (
    "model.path", "model.init", "model.module", "model.trainable", "model.lora.path",
    "model.attention",
)  # fmt: skip


def model_words(path: str, module: str = "auto") -> dict[str, str]:
    """Return the settings (`model.KEY`) of a Hugging Face directory, a run, or a checkpoint.

    Args:
        path: The directory, or the name on the Hub of a published model for estimates.
        module: The value of `model.module`; auto: for a run, that of the run.

    Raises:
        UsageError: If the directory has no model, or one that isn't supported.
    """
    folder = Path(path)
    if not folder.is_dir():
        entry = hub_models().get(path.partition("@")[0])
        if entry is None:
            local_model(path)  # raises for a name on the Hub, with the command to download it
            if folder.exists():
                raise UsageError(f"model.path={path}: expected a directory, got a file")
            raise UsageError(f"model.path={path}: no such directory{nearest_path(path)}")
        return _prefixed(words_of_table(entry["config"], path, module))
    if is_hugging_face(folder):
        file = folder / CONFIG_JSON
        return _prefixed(words_of_content(read_json(file, dict[str, Any]), str(file), module))
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
    return _converted(words, path, module)


def _prefixed(words: dict[str, str]) -> dict[str, str]:
    return {f"model.{name}": text for name, text in words.items()}


def _converted(words: dict[str, str], path: str, module: str) -> dict[str, str]:
    """Convert the settings of a run between our own decoder and the module of transformers."""
    if module == "auto":
        return words
    values = {name: known_key(name).parse(text) for name, text in words.items()}
    model = ModelConfig(
        **{
            name.removeprefix("model."): value
            for name, value in values.items()
            if name.count(".") == 1
        }  # type: ignore[arg-type]  # parsed by their keys
    )
    if model.is_foreign == (module == TRANSFORMERS):
        return words
    lora = {name: text for name, text in words.items() if name in LORA_KEYS}
    return _prefixed(words_of_content(content_of(model), f"model.path={path}", module)) | lora


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
