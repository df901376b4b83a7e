"""Models as other tools name them: a directory, a name on the Hub, or a name and a size."""

import os
import re
from pathlib import Path

from fsdpctl.config.hub_cache import local_model
from fsdpctl.config.hugging_face import CONFIG_JSON
from fsdpctl.errors import UsageError

# Ends of names on the Hub, whoever keeps a copy -> our choices. Whole, so that what is quantized
# or of another size is none of them.
_ON_THE_HUB = {
    r"(meta-)?llama-3(\.1)?-8b(-instruct)?": "llama3_8b",
    r"(meta-)?llama-3(\.[13])?-70b(-instruct)?": "llama3_70b",
    r"(meta-)?llama-3\.1-405b(-instruct)?": "llama3_405b",
    r"llama-3\.2-1b(-instruct)?": "llama3_1b",
    r"llama-2-7b(-chat)?(-hf)?": "llama2_7b",
    r"qwen3-4b(-base|-instruct-2507|-thinking-2507)?": "qwen3_4b",
    r"gpt2": "gpt2",
}
_IN_TORCHTITAN = {
    ("llama3", "1B"): "llama3_1b",
    ("llama3", "8B"): "llama3_8b",
    ("llama3", "70B"): "llama3_70b",
    ("llama3", "405B"): "llama3_405b",
    ("llama2", "7B"): "llama2_7b",
    ("qwen3", "4B"): "qwen3_4b",
}


def words_of_name(name: str) -> tuple[str, ...]:
    """The words for a directory or a name on the Hub; none where nothing here knows it.

    Raises:
        UsageError: the directory has no model.
    """
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        if not (folder / CONFIG_JSON).is_file():
            raise UsageError(f"{name}: there is no {CONFIG_JSON} in it")
        return ("model=hf", f"model.path={name}")
    for weights, init in ((True, ()), (False, ("model.init=random",))):
        if _is_cached(name, weights=weights):
            return ("model=hf", f"model.path={name}", *init)
    last = name.rsplit("/", 1)[-1].partition("@")[0].lower()
    last = re.sub(r"-(fp|bf)16$", "", last)
    known = (choice for form, choice in _ON_THE_HUB.items() if re.fullmatch(form, last))
    return tuple(f"model={choice}" for choice in known)


def words_of_flavor(name: str, flavor: str) -> tuple[str, ...]:
    """The words for a model of torchtitan; none where we have none of that size."""
    choice = _IN_TORCHTITAN.get((name, flavor))
    return () if choice is None else (f"model={choice}",)


def _is_cached(name: str, *, weights: bool) -> bool:
    try:
        return local_model(name, weights=weights) != name
    except UsageError:
        return False
