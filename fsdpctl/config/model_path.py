"""The model in `model.path`."""

from pathlib import Path
from typing import Any

from fsdpctl.config.any_decoder import words_of_content
from fsdpctl.config.gguf_model import config_of_gguf
from fsdpctl.config.hub import hub_models
from fsdpctl.config.model import NO_DECODER, OWN
from fsdpctl.config.overrides import read_run_config
from fsdpctl.config.peft import has_adapters
from fsdpctl.config.sealed import read_sealed
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.io.files import nearest_path
from fsdpctl.io.gguf_header import is_gguf
from fsdpctl.io.run_files import CHECKPOINTS as CHECKPOINTS
from fsdpctl.io.run_files import CONFIG_JSON, MANIFEST
from fsdpctl.io.run_files import RUN_CONFIG as RUN_CONFIG
from fsdpctl.io.untrusted import as_type, read_json

LORA_KEYS = (
    "model.lora.rank", "model.lora.alpha", "model.lora.rslora", "model.lora.targets",
    "model.base_dtype",
)  # fmt: skip
# Settings of the run that saved a model, not of the model.
_NOT_THE_MODELS = (
    "model.path", "model.init", "model.overrides", "model.trainable", "model.lora.path",
    "model.attention", "model.first_new_token",
)  # fmt: skip


def model_words(path: str) -> dict[str, str]:
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
                return _prefixed(words_of_content(config_of_gguf(folder), path))
            if folder.exists():
                raise UsageError(f"model.path={path}: expected a directory or a .gguf file")
            raise UsageError(f"model.path={path}: no such directory{nearest_path(path)}")
        return _prefixed(words_of_content(entry["config"], path))
    if is_hugging_face(folder):
        return words_of_file(folder / CONFIG_JSON)
    ours = _words_of_ours(folder)
    if str(ours.get("model")).startswith(OWN):
        raise UsageError(f"model.path={path}: {NO_DECODER}")
    words = {
        name: str(text)
        for name, text in ours.items()
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
    if "model.config_json" not in words:
        raise UsageError(
            f"model.path={path}: model.config_json: missing; written by another version"
        )
    return words


def words_of_file(file: Path) -> dict[str, str]:
    return _prefixed(words_of_content(read_json(file, dict[str, Any]), str(file)))


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
        words = read_sealed(folder).get("config", {})
        where = f"{folder / MANIFEST}: corrupted"
        return {"of": MANIFEST, **as_type(words, dict[str, str], where, CheckpointError)}
    places = [folder, folder.parent] if above else [folder]
    for file in (place / RUN_CONFIG for place in places):
        if file.is_file() and (file.parent / CHECKPOINTS).is_dir():
            return read_run_config(file)
    return {}
