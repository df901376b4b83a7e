"""Models as other tools name them: a directory, or a name on the Hugging Face Hub."""

import json
import os
import re
from pathlib import Path

from fsdpctl.config.hub import hub_models, local_model
from fsdpctl.config.model_path import model_words
from fsdpctl.config.overrides import OVERRIDES
from fsdpctl.config.source_config import SourceKey
from fsdpctl.errors import UsageError
from fsdpctl.importers.translation import Translation
from fsdpctl.io.run_files import CONFIG_JSON

# Names on the Hub without their owner. They match in full, so that quantized models and models of
# another size don't match.
_ON_THE_HUB = {
    r"(meta-)?llama-3(\.1)?-8b(-instruct)?": "llama3_8b",
    r"(meta-)?llama-3(\.[13])?-70b(-instruct)?": "llama3_70b",
    r"(meta-)?llama-3\.1-405b(-instruct)?": "llama3_405b",
    r"llama-3\.2-1b(-instruct)?": "llama3_1b",
    r"llama-2-7b(-chat)?(-hf)?": "llama2_7b",
    r"qwen3-4b(-base|-instruct-2507|-thinking-2507)?": "qwen3_4b",
    r"gpt2": "gpt2",
}


def settings_of_model(name: str) -> tuple[str, ...]:
    """Return the settings for a directory or a name on the Hub, empty if the name is unknown."""
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        if not (folder / CONFIG_JSON).is_file():
            raise UsageError(f"{name}: {CONFIG_JSON} not found")
        model_words(str(folder))
        return ("model=hf", f"model.path={name}")
    for weights, init in ((True, ()), (False, ("model.init=random",))):
        if _is_cached(name, weights=weights):
            return ("model=hf", f"model.path={name}", *init)
    last = name.rsplit("/", 1)[-1].partition("@")[0].lower()
    last = re.sub(r"-(fp|bf)16$", "", last)
    for form, choice in _ON_THE_HUB.items():
        if re.fullmatch(form, last):
            return (f"model={choice}",)
    if name.partition("@")[0] in hub_models():
        return ("model=hf", f"model.path={name}", "model.init=random")
    return ()


def map_model(found: Translation, value: SourceKey | None, key: str) -> None:
    """Translate the model, which `value` names, of the key `key`."""
    way_on = "add model=llama3_8b, or model=hf model.path=DIR"
    if value is None:
        found.missing.append(("model", f"{key}: not set; {way_on}"))
        return
    name = value.text.strip()
    found.model = SourceKey(value.key, name, ())
    try:
        settings = settings_of_model(name)
    except UsageError as error:
        raise UsageError(f"{found.file}: {value.key}: {error}") from None
    if settings:
        found.map(value, *settings)
        return
    why = "not a directory, in the Hugging Face cache, or a known name"
    found.missing.append(("model", f"{value.key}: {name}: {why}; {way_on}"))


def map_overrides(found: Translation, place: str) -> None:
    """Map the keys of config.json below a key of the other tool."""
    for value in found.source.peek():
        name = value.key.removeprefix(f"{place}.")
        if name != value.key and not name.startswith("_"):
            found.source.take(value.key)
            text = json.dumps(value.items) if value.is_list else value.text
            found.map(value, f"{OVERRIDES}.{name}={text}")


def _is_cached(name: str, *, weights: bool) -> bool:
    try:
        return local_model(name, weights=weights) != name
    except UsageError:
        return False
