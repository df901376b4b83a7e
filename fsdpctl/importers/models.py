"""Models as other tools name them: a directory, or a name on the Hugging Face Hub."""

import json
import os
from contextlib import suppress
from pathlib import Path

from fsdpctl.config.hub import hub_models, local_model
from fsdpctl.config.model_path import model_words
from fsdpctl.config.overrides import OVERRIDES
from fsdpctl.config.source_config import SourceKey
from fsdpctl.errors import UsageError
from fsdpctl.importers.translation import Translation
from fsdpctl.io.run_files import CONFIG_JSON


def settings_of_model(name: str) -> tuple[str, ...]:
    """Return the settings for a directory or a name on the Hub, empty if the name is unknown."""
    folder, by_name = Path(os.path.expanduser(name)), ("model=hf", f"model.path={name}")
    if folder.is_dir():
        if not (folder / CONFIG_JSON).is_file():
            raise UsageError(f"{name}: {CONFIG_JSON} not found")
        model_words(str(folder))
        return by_name
    with suppress(UsageError):  # not on the Hub, or not to be fetched here
        if name.partition("@")[0] in hub_models() or local_model(name, "config") != name:
            return by_name
    return ()


def map_model(found: Translation, value: SourceKey | None, key: str, revision: str = "") -> None:
    """Translate the model, which `value` names, of the key `key`."""
    way_on = "add model=llama3_8b, or model=hf model.path=DIR"
    if value is None:
        found.missing.append(("model", f"{key}: not set; {way_on}"))
        return
    name = f"{value.text.strip()}{revision and '@'}{revision}"
    found.model = SourceKey(value.key, name, ())
    try:
        settings = settings_of_model(name)
    except UsageError as error:
        raise UsageError(f"{found.file}: {value.key}: {error}") from None
    if settings:
        found.map(found.model, *settings)
        return
    why = "not a directory, a known name, or one on the Hugging Face Hub"
    found.missing.append(("model", f"{value.key}: {name}: {why}; {way_on}"))


def map_overrides(found: Translation, place: str) -> None:
    """Map the keys of config.json below a key of the other tool."""
    for value in found.source.peek():
        name = value.key.removeprefix(f"{place}.")
        if name != value.key and not name.startswith("_"):
            found.source.take(value.key)
            text = json.dumps(value.items) if value.is_list else value.text
            found.map(value, f"{OVERRIDES}.{name}={text}")
