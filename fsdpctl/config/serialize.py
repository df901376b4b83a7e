"""A configuration as words and as YAML, and back."""

from collections.abc import Mapping
from operator import attrgetter

import yaml

from fsdpctl.config.keys import Key, Value, section_from, value_in
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.schema import GROUPS, KEYS, SECTIONS, Config
from fsdpctl.config.synonyms import hint
from fsdpctl.errors import CheckpointError, UsageError

_TOY, _TOY_LENGTH, _USUAL_LENGTH = ModelConfig().name, 128, 4096


def known_key(name: str) -> Key:
    """What is known of a key; UsageError, with the nearest spelling, if there is none."""
    if name not in KEYS:
        raise UsageError(f"{name}: no such key{hint(name, [*KEYS, *GROUPS])}")
    return KEYS[name]


def to_config(values: Mapping[str, Value], choices: Mapping[str, str]) -> Config:
    """The configuration of values by key, and the choices of groups."""
    values = {**values, "train.seq_len": values["train.seq_len"] or _length(values, choices)}
    sections = {}
    for section, schema in SECTIONS.items():
        name = {"name": choices[section]} if section in choices else {}
        sections[section] = section_from(section, schema, values, **name)
    return Config(**sections)


def _length(values: Mapping[str, Value], choices: Mapping[str, str]) -> int:
    return usual_length(choices.get("model", _TOY), int(str(values["model.max_seq_len"])))


def usual_length(model: str, max_seq_len: int) -> int:
    """What `train.seq_len=auto` is: a length that figures can be bought by, but for the toy."""
    return _TOY_LENGTH if model == _TOY else min(max_seq_len, _USUAL_LENGTH)


def config_from_words(words: Mapping[str, str]) -> Config:
    """The configuration that `config_words` made into `words`, on whatever machine.

    Raises:
        UsageError: a key is unknown to this version, or its value is not allowed.
    """
    for name in words.keys() - set(GROUPS):
        known_key(name)
    values = {
        name: each.parse(words[name]) if name in words else None if each.optional else each.default
        for name, each in KEYS.items()
    }
    return to_config(values, {name: words[name] for name in GROUPS if name in words})


def config_of_checkpoint(words: Mapping[str, str], where: str) -> Config:
    """The configuration in a manifest.

    Raises:
        CheckpointError: which begins with `where`; as `config_from_words`.
    """
    try:
        return config_from_words(words)
    except UsageError as error:
        raise CheckpointError(f"{where}: damaged, or of another version: {error}") from None


def config_words(config: Config) -> dict[str, str]:
    """The configuration as the words one would type; what is not set is left out."""
    words = {}
    for section in SECTIONS:
        part = getattr(config, section)
        if section in GROUPS:
            words[section] = part.name
        for name, each in KEYS.items():
            if name.startswith(f"{section}.") and not _is_of_an_unused_section(part, name):
                value = value_in(part, name)
                text = each.text(value)
                if text and not (each.is_later and value == each.default):
                    words[name] = text
    return words


def _is_of_an_unused_section(part: object, name: str) -> bool:
    """Whether a key lies in a section within a section that is as nobody has touched it."""
    path = name.split(".")[1:-1]
    inner = attrgetter(".".join(path))(part) if path else None
    return inner is not None and inner == type(inner)()


def words_for_others(config: Config) -> dict[str, str]:
    """The same without commands, which are nobody else's business, and may name what is secret."""
    executed = {name for name, each in KEYS.items() if each.is_executed}
    return {name: text for name, text in config_words(config).items() if name not in executed}


def model_words_only(words: Mapping[str, str]) -> dict[str, str]:
    """Of a configuration, what says which model it is."""
    return {
        name: text for name, text in words.items() if name == "model" or name.startswith("model.")
    }


def config_to_yaml(config: Config) -> str:
    """The configuration as a recipe: reading it gives the same configuration again."""
    return words_to_yaml(config_words(config))


def words_to_yaml(words: Mapping[str, str]) -> str:
    """Words and their values as a recipe, a line each."""
    lines = []
    for name, text in words.items():
        key = KEYS.get(name)
        is_text = key is None or key.type == "text" or text == "auto"
        value = yaml.safe_dump(text, allow_unicode=True, width=10**6) if is_text else text
        lines.append(f"{name}: {value.removesuffix('...' + chr(10)).strip()}")
    return "\n".join(lines) + "\n"
