"""What model the directory `model.path` holds."""

from pathlib import Path
from typing import Any

from fsdpctl.config.hugging_face import CONFIG_JSON, model_words_of
from fsdpctl.config.recipe import read_recipe
from fsdpctl.config.sealed import MANIFEST, read_sealed
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.io.documents import as_type

RUN_CONFIG = "config.yaml"  # of a run of ours
CHECKPOINTS = "checkpoints"
# Of a model, what its weights have to agree with.
SHAPE_KEYS = tuple(
    f"model.{name}"
    for name in (
        "architecture", "num_layers", "hidden_size", "intermediate_size", "num_heads",
        "num_kv_heads", "head_dim", "vocab_size", "attention_bias", "mlp_bias",
    )
)  # fmt: skip
LORA_KEYS = ("model.lora.rank", "model.lora.alpha", "model.lora.rslora", "model.lora.targets")
# But of the run that saved it.
_NOT_THE_MODELS = (
    "model.path", "model.init", "model.trainable", "model.lora.path", "model.attention"
)  # fmt: skip


def model_words(path: str) -> dict[str, str]:
    """The model in a Hugging Face directory, a run, or a checkpoint, as words (`model.KEY`).

    Raises:
        UsageError: there is none, or none that is offered.
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
            f"model.path={path}: neither {CONFIG_JSON} nor a run or checkpoint of a model is in it"
        )
    return words


def is_hugging_face(folder: Path) -> bool:
    """Whether a directory is no run and no checkpoint of ours, but has a config.json."""
    return (folder / CONFIG_JSON).is_file() and not _words_of_ours(folder, above=False)


def is_checkpoint(folder: Path) -> bool:
    """Whether a directory is one checkpoint of ours, or what is left of it."""
    return (folder / MANIFEST).exists() and (
        any(folder.glob("rank-*.safetensors")) or not (folder / CONFIG_JSON).is_file()
    )


def _words_of_ours(folder: Path, *, above: bool = True) -> dict[str, Any]:
    """The configuration of a run or a checkpoint; with `above`, of a run's checkpoints too."""
    if is_checkpoint(folder):
        words = read_sealed(folder).get("config", {})
        where = f"{folder / MANIFEST}: damaged"
        return {"of": MANIFEST, **as_type(words, dict[str, str], where, CheckpointError)}
    places = [folder, folder.parent] if above else [folder]
    for file in (place / RUN_CONFIG for place in places):
        if file.is_file() and (file.parent / CHECKPOINTS).is_dir():
            return dict(read_recipe(file))
    return {}
