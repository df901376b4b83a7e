"""Conversion of a configuration to settings and YAML, and back."""

import json
from collections.abc import Mapping

import yaml

from fsdpctl.config.keys import AUTO, NONE, Key, Value, section_from
from fsdpctl.config.model import NO_DECODER, SCRIPT_PREFIX
from fsdpctl.config.schema import GROUPS, KEYS, SECTIONS, Config
from fsdpctl.config.synonyms import hint
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.io.texts import escaped


def known_key(name: str) -> Key:
    """Return a key; UsageError with the nearest spelling if it doesn't exist."""
    if name not in KEYS:
        raise UsageError(f"{name}: no such key{hint(name, [*KEYS, *GROUPS])}")
    return KEYS[name]


def to_config(values: Mapping[str, Value], choices: Mapping[str, str]) -> Config:
    """Create the configuration from values by key, and the selected options of groups."""
    sections = {}
    for section, schema in SECTIONS.items():
        name = {"name": choices[section]} if section in choices else {}
        sections[section] = section_from(section, schema, values, **name)
    return Config(**sections)


def config_from_settings(words: Mapping[str, str]) -> Config:
    """Create the configuration from the result of `config_words`, on any machine.

    UsageError if this version doesn't know a key, or doesn't allow its value.
    """
    for name in words.keys() - {*GROUPS}:
        known_key(name)
    values = {
        name: each.parse(words[name]) if name in words else None if each.optional else each.default
        for name, each in KEYS.items()
    }
    return to_config(values, {name: words[name] for name in GROUPS if name in words})


def config_of_checkpoint(
    words: Mapping[str, str], where: str, *, is_decoder: bool = True
) -> Config:
    """Create the configuration in a manifest, which is at `where`.

    CheckpointError if `config_from_words` fails. UsageError if it must be that of a decoder, and is
    not.
    """
    if is_decoder and words.get("model", "").startswith(SCRIPT_PREFIX):
        raise UsageError(f"{where}: {NO_DECODER}")
    try:
        return config_from_settings(words)
    except UsageError as error:
        problem = f"corrupted, or written by another version: {error}"
        raise CheckpointError(f"{where}: {problem}") from None


def to_settings(config: Config) -> dict[str, str]:
    """Return the configuration as settings by key, without keys that aren't set."""
    words = {}
    for section in SECTIONS:
        if section in GROUPS:
            words[section] = config.value(section)
        if config.model.is_script_module and section in ("model", "data"):
            continue
        for name, each in KEYS.items():
            is_of_this = name.startswith(f"{section}.") and not _is_of_an_unused_part(config, name)
            text = each.text(value := config.value(name)) if is_of_this else ""
            if is_of_this and value is None and each.is_selected:
                text = AUTO if config.is_auto(name) else NONE if config.is_set(name) else ""
            if text:
                words[name] = text
    return words


def user_settings(config: Config) -> dict[str, str]:
    """Return the same without what follows from other settings."""
    words = to_settings(config)
    return {name: text for name, text in words.items() if name in GROUPS or not KEYS[name].user_key}


def _is_of_an_unused_part(config: Config, name: str) -> bool:
    part = name.rpartition(".")[0]
    return "." in part and (inner := config.value(part)) == type(inner)()


def only_model_settings(words: Mapping[str, str]) -> dict[str, str]:
    return {x: text for x, text in words.items() if x == "model" or x.startswith("model.")}


def config_to_yaml(config: Config) -> str:
    """Return the configuration as a recipe, which gives the same configuration when read."""
    return settings_to_yaml(to_settings(config))


def settings_to_yaml(words: Mapping[str, str], notes: Mapping[str, str] = {}) -> str:
    """Return settings as a recipe, with a line for each, and its note as a comment."""
    lines = []
    for name, text in words.items():
        key = KEYS.get(name)
        is_text = key is None or (key.type == "text" and not key.is_mapping) or text == "auto"
        value = text
        if not text.isprintable():
            value = escaped(json.dumps(text, ensure_ascii=False))
        elif is_text:
            value = yaml.safe_dump(text, allow_unicode=True, width=10**6)
        note = f"  # {notes[name]}" if name in notes else ""
        lines.append(f"{name}: {value.removesuffix('...' + chr(10)).strip()}{note}")
    return "\n".join(lines) + "\n"
