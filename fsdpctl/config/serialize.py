"""Conversion of a configuration to settings and YAML, and back."""

import json
from collections.abc import Mapping

import yaml

from fsdpctl.config.keys import AUTO, NONE, Key, Settings, Value, section_from
from fsdpctl.config.model import NO_DECODER, SCRIPT_PREFIX
from fsdpctl.config.schema import GROUPS, KEYS, SECTIONS, Config
from fsdpctl.config.synonyms import hint
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.io.texts import escaped


def known_key(name: str) -> Key:
    """Return the key of a name; UsageError with the nearest spelling if it doesn't exist."""
    if name not in KEYS:
        raise UsageError(f"{name}: no such key{hint(name, [*KEYS, *GROUPS])}")
    return KEYS[name]


def to_config(values: Mapping[str, Value], choices: Settings) -> Config:
    """Create the configuration from values by key, and the selected options of groups."""
    sections = {}
    for section, schema in SECTIONS.items():
        name = {"name": choices[section]} if section in choices else {}
        sections[section] = section_from(section, schema, values, **name)
    return Config(**sections)


def config_from_settings(settings: Settings) -> Config:
    """Create the configuration from the settings that `to_settings` returned.

    UsageError if this version doesn't have a key, or doesn't allow its value.
    """
    for name in settings.keys() - {*GROUPS}:
        known_key(name)
    # `to_settings` omits optional keys without a value.
    unset = {name: None if key.optional else key.default for name, key in KEYS.items()}
    values = {name: KEYS[name].parse(settings[name]) for name in KEYS if name in settings}
    groups = {name: settings[name] for name in GROUPS if name in settings}
    return to_config(unset | values, groups)


def config_of_checkpoint(settings: Settings, location: str, *, is_decoder: bool = True) -> Config:
    """Create the configuration from the settings in a checkpoint's manifest.

    `location` begins messages. CheckpointError if the settings are invalid. UsageError with
    `is_decoder` if the checkpoint has a module of a script.
    """
    if is_decoder and settings.get("model", "").startswith(SCRIPT_PREFIX):
        raise UsageError(f"{location}: {NO_DECODER}")
    try:
        return config_from_settings(settings)
    except UsageError as error:
        problem = f"corrupted, or written by another version: {error}"
        raise CheckpointError(f"{location}: {problem}") from None


def to_settings(config: Config) -> dict[str, str]:
    """Return the text of each key and group that is set."""
    settings = {}
    for section in SECTIONS:
        if section in GROUPS:
            settings[section] = config.value(section)
        if config.model.is_script_module and section in ("model", "data"):
            continue
        for name, key in KEYS.items():
            if not name.startswith(f"{section}.") or _is_in_unused_subsection(config, name):
                continue
            text = key.text(value := config.value(name))
            if value is None and key.auto_and_none:
                text = AUTO if config.is_auto(name) else NONE if config.is_set(name) else ""
            if text:
                settings[name] = text
    return settings


def user_settings(config: Config) -> dict[str, str]:
    """Return only the settings that users set; derived ones are omitted."""
    pairs = to_settings(config).items()
    return {name: text for name, text in pairs if name in GROUPS or not KEYS[name].user_key}


def _is_in_unused_subsection(config: Config, name: str) -> bool:
    """Return whether a key is in a subsection whose keys all have their defaults."""
    section = name.rpartition(".")[0]
    return "." in section and (value := config.value(section)) == type(value)()


def only_model_settings(settings: Settings) -> dict[str, str]:
    """Return the settings of the section `model`."""
    return {x: text for x, text in settings.items() if x == "model" or x.startswith("model.")}


def config_to_yaml(config: Config) -> str:
    """Return the configuration as a recipe; reading the recipe returns an equal configuration."""
    return settings_to_yaml(to_settings(config))


def settings_to_yaml(settings: Settings, notes: Mapping[str, str] = {}) -> str:
    """Return settings as a recipe: one line per setting, with its note as a comment."""
    lines = []
    for name, text in settings.items():
        key = KEYS.get(name)
        is_text = key is None or (key.type == "text" and not key.is_mapping) or text == AUTO
        value = text
        if not text.isprintable():
            value = escaped(json.dumps(text, ensure_ascii=False))
        elif is_text:  # safe_dump ends a plain text with `...`, the end of the document
            value = yaml.safe_dump(text, allow_unicode=True, width=10**6).removesuffix("...\n")
        note = f"  # {notes[name]}" if name in notes else ""
        lines.append(f"{name}: {value.strip()}{note}")
    return "\n".join(lines) + "\n"
