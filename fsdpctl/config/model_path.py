"""What model the directory `model.path` holds."""

import re
from pathlib import Path

from fsdpctl.config.hugging_face import CONFIG_JSON, model_words_of, read_json
from fsdpctl.config.recipe import read_recipe
from fsdpctl.errors import UsageError

_MANIFEST, _RUN_CONFIG = "manifest.json", "config.yaml"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_NOT_THE_MODELS = ("model.path", "model.init")  # but of the run that saved it


def model_words(path: str) -> dict[str, str]:
    """The model in a Hugging Face directory, a run, or a checkpoint, as words (`model.KEY`).

    Raises:
        UsageError: there is none, or none that is offered.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"model.path={path}: no such directory{_download_hint(path)}")
    if (folder / _MANIFEST).is_file():
        words = read_json(folder / _MANIFEST).get("config")
        found = dict(words) if isinstance(words, dict) else {}
    elif (folder / _RUN_CONFIG).is_file():
        found = dict(read_recipe(folder / _RUN_CONFIG))
    elif (folder / CONFIG_JSON).is_file():
        file = folder / CONFIG_JSON
        return {f"model.{name}": text for name, text in model_words_of(file).items()}
    elif (folder.parent / _RUN_CONFIG).is_file():  # its checkpoints
        found = dict(read_recipe(folder.parent / _RUN_CONFIG))
    else:
        raise UsageError(
            f"model.path={path}: neither {CONFIG_JSON} nor a run or checkpoint is in it"
        )
    return {
        name: str(text)
        for name, text in found.items()
        if name.startswith("model.") and name not in _NOT_THE_MODELS
    }


def _download_hint(path: str) -> str:
    if not _HUB_NAME.fullmatch(path):
        return ""
    name = path.rsplit("/", 1)[1]
    return (
        f"; fsdpctl downloads nothing: `hf download {path} --local-dir {name}`, then "
        f"model.path={name}"
    )
