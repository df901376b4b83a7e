"""Models by their name on the Hugging Face Hub: cached, fetched, or in the table of models."""

import os
import re
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from fsdpctl.config.model import ModelConfig
from fsdpctl.errors import UsageError
from fsdpctl.io.files import nearest_path_hint
from fsdpctl.io.gguf_header import GGUF_SUFFIX
from fsdpctl.io.hub_repository import Repository, hub_cache, is_offline
from fsdpctl.io.hub_responses import is_relative_path
from fsdpctl.io.run_files import CONFIG_JSON, RUNS
from fsdpctl.io.untrusted import read_json

TABLE = Path(__file__).parent / "hub_models.json"
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w.-]+(?:/[\w.-]+)*))?")
_SNAPSHOT = re.compile(r"(.+)/models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})/?")
# Files other than weights. They contain nothing that Python could run or unpickle.
_SMALL = re.compile(
    r"[^/]+\.(json|jinja|model|txt|spm|codes|tokenizer)|additional_chat_templates/[^/]+\.jinja"
)
_SINGLE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"

Part = Literal["config", "tokenizer", "weights"]  # each includes the parts before it


def local_model(
    path: str, part: Part = "weights", *, allow_table: bool = False, key: str = "model.path="
) -> str:
    """Return the directory of `ORG/NAME[@REVISION]`, or `path` if it is another path.

    As in transformers, an existing directory of that name takes precedence. Files of `part` that
    the cache lacks are fetched, also if `path` is a directory in the cache. With `allow_table`, a
    name in the table of models is returned unchanged if the cache lacks the model. UsageError if
    the model is not on the Hub, or if fetching fails or is disabled.
    """
    if (repository := _repository(path, key)) is None:
        return path
    if missing := _first_missing(repository, part):
        if allow_table and path.partition("@")[0] in hub_models():
            return path
        if is_offline():
            raise repository.missing_error(missing)
        if repository.snapshot() is None and (parent := Path(path).parent).is_dir():
            problem = f"no such directory{nearest_path_hint(path)}"
            problem += f"; {parent} is a directory, so the Hub is not searched"
            raise UsageError(f"{repository.location}: {problem}")
        with repository.locked():
            if part == "weights":  # the files of the tokenizer include the index of the weights
                _fetch(repository, "tokenizer")
            _fetch(repository, part)
    return str(repository.snapshot())


def model_directory(path: Path, part: Part = "weights") -> Path:
    """Return the same as `local_model`, but a name below a directory is a path unless cached."""
    repository = _repository(str(path))
    is_path = repository is None or (path.parent.is_dir() and not repository.folder.is_dir())
    return path if is_path else Path(local_model(str(path), part, key=""))


def has_weights(path: Path) -> bool:
    """Return whether all files of a model are on this machine."""
    repository = _repository(str(path))
    return repository is None or not _first_missing(repository, "weights")


def print_missing_weights(path: str) -> bool:
    """Print the files that a run would fetch, and return whether there are any."""
    repository = _repository(path)
    if repository is None or not (missing := _first_missing(repository, "weights")):
        return False
    if is_offline():
        raise repository.missing_error(missing)
    repository.fetch(lambda names: _needed(names, repository.snapshot(), "weights"), dry_run=True)
    return True


def part_for_training(model: ModelConfig) -> Part:
    """Return the part of a model that a run reads."""
    return "weights" if model.is_pretrained else "tokenizer"


def _repository(path: str, key: str = "model.path=") -> Repository | None:
    """Return the repository that a path names; None for a path on this machine."""
    location = f"{key}{path}"
    if (match := _SNAPSHOT.fullmatch(path)) and Path(match[1]) == hub_cache():
        return Repository(f"{match[2]}/{match[3]}", match[4], "model", location)
    match = _HUB_NAME.fullmatch(path)
    is_path = path.startswith(f"{RUNS}/") or ".." in path or path.endswith(GGUF_SUFFIX)
    if match is None or is_path or os.path.exists(path):
        return None
    return Repository(match[1], match[2], "model", location)


def _fetch(repository: Repository, part: Part) -> None:
    """Fetch the missing files of a part. The files of weights are listed in their index."""
    if not _first_missing(repository, part):
        return  # another process has fetched it
    listed = repository.fetch(lambda names: _needed(names, repository.snapshot(), part))
    if missing := _first_missing(repository, part):
        unread = sorted(each for each in listed if each.endswith((".bin", ".pt", ".pth", ".gguf")))
        note = f"; {unread[0]} is not read" if unread and missing != CONFIG_JSON else ""
        raise UsageError(f"{repository.location}: {missing} is missing on the Hub{note}")


def _first_missing(repository: Repository, part: Part) -> str:
    """Return the name of a file of a part that the cache lacks, or an empty text."""
    snapshot = repository.snapshot()
    if snapshot is None:
        return CONFIG_JSON
    names = repository.names() if part != "config" else ()
    needed = _needed(names, snapshot, part)
    return next((each for each in needed if not (snapshot / each).is_file()), "")


def _needed(names: Collection[str], snapshot: Path | None, part: Part) -> list[str]:
    """Return the files of a part; `names` are all files on the Hub, or empty if unknown."""
    needed = [CONFIG_JSON]
    if part == "config":
        return needed
    needed += filter(_SMALL.fullmatch, names)
    if part == "tokenizer":
        return needed
    cached = {each.name for each in snapshot.iterdir()} if snapshot else set()
    if _SINGLE_FILE not in {*names, *cached} and snapshot is not None and _INDEX in cached:
        weights = read_json(snapshot / _INDEX, dict[str, Any]).get("weight_map")
        shards = {str(each) for each in weights.values()} if isinstance(weights, dict) else set()
        shards = {x for x in shards if x.endswith(".safetensors") and is_relative_path(x)}
        return needed + sorted(shards)
    # Without an index, one file has the weights, which may have any name.
    single = [x for x in names if x.endswith(".safetensors") and "/" not in x]
    return [*needed, *(single if len(single) == 1 else [_SINGLE_FILE])]


@lru_cache(maxsize=1)
def hub_models() -> dict[str, dict[str, Any]]:
    """Return the configurations of published models by name, for estimates.

    The table has each model's config.json without transformers' defaults and with resolved
    rope_parameters, its source, and the published number of parameters, which a test compares
    with the number in the module. Several names can have one configuration.
    """
    content = read_json(TABLE, dict[str, Any])
    models: dict[str, dict[str, Any]] = content["models"]
    return {**models, **{name: models[target] for name, target in content["aliases"].items()}}
