"""Models by their name on the Hugging Face Hub: in its cache, or known. Nothing is downloaded."""

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from fsdpctl.errors import UsageError
from fsdpctl.io.gguf_header import SUFFIX
from fsdpctl.io.run_files import CONFIG_JSON
from fsdpctl.io.untrusted import read_json

TABLE = Path(__file__).parent / "hub_models.json"
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def local_model(path: str, *, weights: bool = True) -> str:
    """Return the cached directory of `ORG/NAME[@REVISION]`, or `path` if it is another path.

    As in transformers, an existing directory of that name takes precedence. With `weights`, the
    cache must have them too.

    Raises:
        UsageError: If files are missing in the cache. The message has the command to download them.
    """
    match = _NAME.fullmatch(path)
    if match is None or os.path.exists(path) or ".." in path or path.endswith(SUFFIX):
        return path
    name, revision = match.groups()
    fetch = f"`hf download {name}{f' --revision {revision}' if revision else ''}`"
    snapshot = _snapshot(name, revision)
    if snapshot is None:
        raise UsageError(
            f"model.path={path}: no such directory, and not in the Hugging Face cache "
            f"({cache_folder()}); fsdpctl downloads nothing, run {fetch}"
        )
    if missing := _missing(snapshot, weights=weights):
        raise UsageError(
            f"model.path={path}: {missing} is missing in the Hugging Face cache; run {fetch}"
        )
    return str(snapshot)


def cached_model(path: Path) -> Path:
    """Return the cached directory for a command's argument, or the path if it isn't in the cache.

    Raises:
        UsageError: If the cache has only a part of the model.
    """
    match = _NAME.fullmatch(str(path))
    is_known = match and (cache_folder() / f"models--{match[1].replace('/', '--')}").is_dir()
    return Path(local_model(str(path))) if is_known else path


def cache_folder() -> Path:
    from huggingface_hub import constants  # takes 0.1 s, and few commands need it

    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or constants.HF_HUB_CACHE))


def _snapshot(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    for file in (CONFIG_JSON, _INDEX, _WEIGHTS):
        found = try_to_load_from_cache(name, file, cache_dir=cache_folder(), revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    return None


def _missing(snapshot: Path, *, weights: bool) -> str:
    """Return the first missing file that the model needs, or an empty text."""
    needed = [CONFIG_JSON]
    if weights and (snapshot / _INDEX).is_file():
        shards = read_json(snapshot / _INDEX, dict[str, Any])
        names = shards.get("weight_map")
        needed += sorted({str(each) for each in names.values()} if isinstance(names, dict) else ())
    elif weights:
        needed.append(_WEIGHTS)
    return next((each for each in needed if not (snapshot / each).is_file()), "")


@lru_cache(maxsize=1)
def hub_models() -> dict[str, dict[str, Any]]:
    """Return the configurations of published models by name, for estimates.

    The table has facts only, with their source: the values of config.json that differ from the
    defaults of transformers, with resolved rope_parameters, and the public number of parameters,
    which a test compares with the module's. Models can have equal configurations.
    """
    content = read_json(TABLE, dict[str, Any])
    models: dict[str, dict[str, Any]] = content["models"]
    return {**models, **{name: models[same] for name, same in content["aliases"].items()}}
