"""Models by their name on the Hugging Face Hub, looked up in its cache: nothing is downloaded.

The cache's layout is huggingface_hub's: models--ORG--NAME/refs/REVISION names a commit, whose
files lie, as links, in models--ORG--NAME/snapshots/COMMIT.
"""

import os
import re
from pathlib import Path
from typing import Any

from fsdpctl.config.hugging_face import CONFIG_JSON
from fsdpctl.errors import UsageError
from fsdpctl.io.documents import MIB, read_json
from fsdpctl.io.files import read_text_file

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def local_model(path: str, *, weights: bool = True) -> str:
    """The directory that `path` means: itself, or the cached one of `ORG/NAME[@REVISION]`.

    A directory of that name is taken first, as transformers does. What is neither a directory nor
    such a name is returned as it is.

    Args:
        path: what was typed.
        weights: whether the model's weights have to be in the cache too.

    Raises:
        UsageError: the cache does not have it, or not all of it; names the command that fetches it.
    """
    match = _NAME.fullmatch(path)
    if match is None or os.path.exists(path) or ".." in path:
        return path
    owner, name, revision = match.groups()
    fetch = f"`hf download {owner}/{name}{f' --revision {revision}' if revision else ''}`"
    root = cache_folder()
    folder = root / f"models--{owner}--{name}"
    commit = _commit(folder, revision or "main")
    snapshot = folder / "snapshots" / str(commit)
    if commit is None or not snapshot.is_dir():
        raise UsageError(
            f"model.path={path}: no such directory, and the cache of Hugging Face ({root}) does "
            f"not have it; fsdpctl downloads nothing: {fetch}"
        )
    missing = _missing(snapshot, weights=weights)
    if missing:
        raise UsageError(
            f"model.path={path}: the cache of Hugging Face has it without {missing}; {fetch} "
            "completes it"
        )
    return str(snapshot)


def cached_model(path: Path) -> Path:
    """The same for a command's argument: the path itself where the cache has nothing of its name.

    Raises:
        UsageError: the cache has a part of it.
    """
    match = _NAME.fullmatch(str(path))
    known = match and (cache_folder() / f"models--{match[1]}--{match[2]}").is_dir()
    return Path(local_model(str(path))) if known else path


def cache_folder() -> Path:
    """Where huggingface_hub keeps what it fetched, by its own variables."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return _expanded(os.environ[name])
    if os.environ.get("HF_HOME"):
        return _expanded(os.environ["HF_HOME"]) / "hub"
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def _expanded(path: str) -> Path:
    return Path(os.path.expandvars(os.path.expanduser(path)))


def _commit(folder: Path, revision: str) -> str | None:
    if _COMMIT.fullmatch(revision):
        return revision
    ref = folder / "refs" / revision
    if not ref.is_file():
        return None
    found = read_text_file(ref, MIB, follows=True).strip()
    return found if _COMMIT.fullmatch(found) else None


def _missing(snapshot: Path, *, weights: bool) -> str:
    """The first of the files that a model needs which is not there, or an empty name."""
    needed = [CONFIG_JSON]
    if weights and (snapshot / _INDEX).is_file():
        shards = read_json(snapshot / _INDEX, dict[str, Any], most_bytes=64 * MIB)
        names = shards.get("weight_map")
        needed += sorted({str(each) for each in names.values()} if isinstance(names, dict) else ())
    elif weights:
        needed.append(_WEIGHTS)
    return next((each for each in needed if not (snapshot / each).is_file()), "")
