"""Builds a `Config` out of typed words, a recipe and the choices in conf/.

Hydra composes the choices. Values never pass its grammar, so any file name arrives as typed.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from fsdpctl.config.files import choices_of, package_folder
from fsdpctl.config.from_path import FROM_PATH, values_of_adapters, values_of_path, with_model
from fsdpctl.config.keys import AUTO, Value
from fsdpctl.config.recipe import (
    check_config_dir,
    find_recipe,
    own_choice,
    read_recipe,
    recipe_names,
    refuse_commands,
)
from fsdpctl.config.schema import GROUPS, KEYS, LENGTHS, SECTIONS, SIZES, Config
from fsdpctl.config.serialize import to_config
from fsdpctl.config.synonyms import hint
from fsdpctl.errors import UsageError
from fsdpctl.plan.strategy import STRATEGIES_ELSEWHERE, with_resharding

_OPTIONS = ("--recipe", "--config-dir", "--resume", "--dry-run", "--print-config", "--help")

_RESHARDING = ("reshard_after_forward", "strategy.reshard_after_forward")
# With torchtitan's words for it.
_RESHARDS = {"true": True, "false": False, "always": True, "default": True, "never": False}

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Composed:
    """A configuration, and what is worth saying about how it came about."""

    config: Config
    recipe: str | None  # its name, without folder and ending
    dropped: tuple[str, ...]  # recipe keys that a choice on the command line overruled
    automatic: frozenset[str]  # keys that nobody gave a value


def compose_config(
    words: Sequence[str], recipe: str | None = None, config_dir: Path | None = None
) -> Composed:
    """The configuration that `words` (KEY=VALUE) and a recipe ask for.

    Raises:
        UsageError: a word is unknown or given twice, or its value is not allowed.
    """
    check_config_dir(config_dir)
    typed = [_split(word) for word in words]
    _refuse_doubles(typed)
    path = None if recipe is None else find_recipe(recipe)
    base = read_recipe(path) if path else []
    refuse_commands(str(recipe), base, typed)
    _refuse_doubles(base)
    base = _resharding(base, [])
    typed = _resharding(typed, base)
    chosen = {name for name, _ in typed if name in GROUPS}
    dropped = tuple(name for name, _ in base if "." in name and name.split(".")[0] in chosen)
    kept = [pair for pair in base if pair[0] not in chosen and pair[0] not in dropped]
    pairs = with_model([_in_our_words(*pair) for pair in (*kept, *typed)])
    _check_known(pairs, config_dir)
    choices = {name: text for name, text in pairs if name in GROUPS}
    values = _values_of_choices(choices, config_dir)
    values.update(values_of_path(choices, dict(pairs)))
    values.update(values_of_adapters(choices, dict(pairs)))
    values.update({name: KEYS[name].parse(text) for name, text in pairs if name in KEYS})
    given = {name for name, _ in typed}
    _settle("the length", LENGTHS, values, given, {name for name, _ in kept})
    _settle("the size of a step", SIZES, values, given, {name for name, _ in kept})
    automatic = frozenset(name for name, value in values.items() if value is None)
    config = to_config(values, choices)
    return Composed(config, path.stem if path else None, dropped, automatic)


def _resharding(pairs: list[Pair], below: list[Pair]) -> list[Pair]:
    """The strategy for FSDP's `reshard_after_forward`, which tells two of ours apart.

    It changes the strategy that is named beside it, or `below`.
    """
    asked = [(name, text) for name, text in pairs if name in _RESHARDING]
    if not asked:
        return pairs
    name, text = asked[-1]
    if text.lower() not in _RESHARDS:
        raise UsageError(f"{name}={text}: allowed is {', '.join(_RESHARDS)}")
    named = dict([*below, *pairs]).get("strategy", "full_shard")
    if named == AUTO:
        raise UsageError(f"{name}={text}: strategy=auto chooses that too; leave one of them out")
    strategy = with_resharding(named, _RESHARDS[text.lower()]).name
    kept = [pair for pair in pairs if pair[0] not in (*_RESHARDING, "strategy")]
    return [*kept, ("strategy", strategy)]


def _in_our_words(name: str, text: str) -> Pair:
    """A strategy by the name that other tools have for it."""
    return name, STRATEGIES_ELSEWHERE.get(text.lower(), text) if name == "strategy" else text


def _split(word: str) -> Pair:
    name, equals, value = word.partition("=")
    name = name.strip()
    if word.startswith("-"):
        known = hint(name.lstrip("-").replace("-", "_"), [*KEYS, *GROUPS])
        if name in _OPTIONS:
            raise UsageError(f"{word}: written as {name} VALUE, or no option of this command")
        raise UsageError(
            f"{word}: no such option; settings are typed KEY=VALUE"
            f"{known or hint(name, list(_OPTIONS))}"
        )
    if name[:1] in ("+", "~") or "@" in name:
        raise UsageError(
            f"{name}: keys are neither added nor removed here; `fsdpctl list` shows those there are"
        )
    if not name:
        raise UsageError(f"{word!r}: write KEY=VALUE")
    try:
        word.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{word!r}: not UTF-8; rename the file") from None
    if name == "hydra" or name.startswith("hydra."):
        raise UsageError(f"{name}: Hydra's own settings are not open; `fsdpctl list` shows ours")
    if not equals:
        raise UsageError(f"{word}: write KEY=VALUE, without spaces around the ={_meant_by(word)}")
    return name, value


def _meant_by(word: str) -> str:
    """What a word without a value may have been meant for."""
    if word in KEYS or word in GROUPS:
        return ""
    if word in recipe_names():
        return f"; a recipe is --recipe {word}"
    for group in GROUPS:
        if word in choices_of(group):
            return f"; did you mean {group}={word}?"
    if word.endswith((".toml", ".json")):
        return "; a recipe is a YAML file; what is another tool's, `estimate-memory --from` reads"
    if os.path.exists(word):
        return f"; a text is data=text data.path={word}"
    return hint(word, [*KEYS, *GROUPS])


def _refuse_doubles(typed: Sequence[Pair]) -> None:
    seen: dict[str, str] = {}
    for name, value in typed:
        if name in seen:
            raise UsageError(f"{name}: given twice, as {seen[name]} and as {value}")
        seen[name] = value


def _check_known(pairs: Sequence[Pair], config_dir: Path | None) -> None:
    """Refuse what is unknown, the first in full and the others by name."""
    errors = {}
    for name, text in pairs:
        try:
            _check_one(name, text, config_dir)
        except UsageError as error:
            errors[name] = error
    if errors:
        first, *others = errors
        known = [(name, hint(name, [])) for name in others]
        told = [f"{name} ({said[2:]})" if said else name for name, said in known]
        more = f"; nor are known: {', '.join(told)}" if told else ""
        raise UsageError(f"{errors[first]}{more}")


def _check_one(name: str, text: str, config_dir: Path | None) -> None:
    if name in GROUPS:
        choices = choices_of(name, config_dir)
        if text not in choices:
            raise UsageError(
                f"{name}={text}: no such choice{_choice_hint(name, text, choices)} "
                f"({', '.join(choices)})"
            )
    elif name in SECTIONS or any(key.startswith(f"{name}.") for key in KEYS):
        section = name.split(".")[0]
        raise UsageError(f"{name}: a section, not a key; `fsdpctl list {section}` shows its keys")
    elif name not in KEYS:
        raise UsageError(f"{name}: no such key{hint(name, [*KEYS, *GROUPS])}")


def _choice_hint(group: str, text: str, choices: Sequence[str]) -> str:
    if group == "model" and ("/" in text or os.path.isdir(text)):
        return f"; model={FROM_PATH} model.path={text} takes a directory"
    return hint(text, list(choices))


def _values_of_choices(choices: dict[str, str], config_dir: Path | None) -> dict[str, Value]:
    """The values that files of choices give, checked like typed ones; defaults elsewhere."""
    ours = {group: choice for group, choice in choices.items() if choice in choices_of(group)}
    pairs = list(_texts(_composed_by_hydra(ours)))
    for section, choice in choices.items():
        if section not in ours:
            assert config_dir is not None
            file = config_dir / section / f"{choice}.yaml"
            pairs += ((f"{section}.{word}", text) for word, text in own_choice(file))
    values = {name: each.default for name, each in KEYS.items()}
    for name, text in pairs:
        if name not in KEYS:
            section = name.split(".")[0]
            raise UsageError(
                f"the file of {section}={choices[section]}: {name}: no such key"
                f"{hint(name, list(KEYS))}"
            )
        values[name] = KEYS[name].parse(text)
    return values


def _texts(composed: Mapping[str, Mapping[str, Any]]) -> Iterator[Pair]:
    for section, content in composed.items():
        for word, value in content.items():
            if word != "name":
                text = str(value).lower() if isinstance(value, bool) else str(value)
                yield f"{section}.{word}", text


# The content of an option's file, by group and option; None: the group's default option.
_contents: dict[tuple[str, str | None], Mapping[str, Any]] = {}


def _composed_by_hydra(choices: Mapping[str, str]) -> Mapping[str, Mapping[str, Any]]:
    """Return the content of each group's selected file. A process reads each file once."""
    options = [(group, choices.get(group)) for group in GROUPS]
    if not all(each in _contents for each in options):
        conf = str(package_folder("conf").resolve())
        with initialize_config_dir(conf, version_base="1.3"):
            overrides = [f"{group}={choice}" for group, choice in choices.items()]
            composed: Any = OmegaConf.to_container(compose("config", overrides))
        _contents.update({each: composed.get(each[0]) or {} for each in options})
    return {group: _contents[group, option] for group, option in options}


def _settle(what: str, names: Sequence[str], values: dict[str, Value], *given: set[str]) -> None:
    """One of several ways to say something: that of the first of those `given` that has any."""
    for source in given:
        said = [name for name in names if name in source]
        if len(said) > 1:
            raise UsageError(f"{' and '.join(said)}: say {what} in one way only")
        if said:
            unset = (name for name in names if name != said[0] and KEYS[name].optional)
            values.update(dict.fromkeys(unset))
            return
