"""Compose a `Config` from settings, a recipe and the options in conf/.

Hydra composes the options. Values never pass through its grammar, so any file name is safe.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import TypeVar

from fsdpctl.config.clusters import clusters_like, clusters_with_memory
from fsdpctl.config.hub import hub_models
from fsdpctl.config.keys import AUTO, Setting, Value
from fsdpctl.config.model import NO_DECODER, SCRIPT_PREFIX
from fsdpctl.config.model_path import HF_OPTION, adapter_values, fetch_model_config, model_values
from fsdpctl.config.options import choices_of, option_settings, option_values
from fsdpctl.config.overrides import merge_overrides
from fsdpctl.config.recipe import NO_TOML, find_recipe, read_recipe, recipe_names, without_missing
from fsdpctl.config.schema import (
    BATCH_SIZE_KEYS,
    GROUPS,
    KEYS,
    LENGTH_KEYS,
    SECTIONS,
    Config,
    Origin,
)
from fsdpctl.config.serialize import to_config
from fsdpctl.config.shorthands import (
    RANK_KEYS,
    expand_shorthands,
    is_hub_name,
    is_model_name,
    translate_strategy,
)
from fsdpctl.config.synonyms import hint
from fsdpctl.errors import UsageError, did_you_mean
from fsdpctl.plan.strategy import STRATEGY_ALIASES

TRAIN_OPTIONS = ("--recipe", "--resume", "--dry-run", "--print-config", "--help")
_MOST_TOLD = 10  # mistakes of a command
T = TypeVar("T")

# Keys that apply to every option of their group.
FOR_ANY_OPTION = ("model.lora.", "model.base_dtype", "data.val_fraction", "strategy.offload")

OnChecked = Callable[[Config, str | None], None]


@dataclass(frozen=True, slots=True)
class Composed:
    """A configuration as it was asked for, and facts about its composition."""

    config: Config
    recipe: str | None = None  # its name, without directory and suffix
    dropped: tuple[str, ...] = ()  # recipe keys overridden by an option, or by `model.lora.path`
    renamed: tuple[str, ...] = ()  # options by their names in other tools, a line each
    cluster: str | None = None  # as it is given

    @property
    def has_cluster_of_recipe(self) -> bool:
        return self.config.origins.get("cluster") is Origin.RECIPE

    @property
    def ignored(self) -> tuple[str, ...]:
        """A line for each key of the recipe that is overridden."""
        causes = {
            name: "that of model.lora.path applies"
            if name.startswith("model.lora.")
            else f"{name.split('.')[0]} is set on the command line"
            for name in self.dropped
        }
        return tuple(f"{name} of the recipe ignored: {why}" for name, why in causes.items())


def compose_config(
    settings: Sequence[str],
    recipe: str | None = None,
    *,
    converted: Sequence[Setting] | None = None,
    on_checked: OnChecked | None = None,
    for_training: bool = False,
) -> Composed:
    """Return the configuration of `settings` (KEY=VALUE settings) and a recipe.

    `converted` are the settings of the recipe if its file is another tool's. `on_checked` is called
    with the configuration and the recipe's name before the model is read, which may import torch.
    `for_training` is passed to `fetch_model_config`. UsageError if a setting is unknown or given
    twice, or if a value is invalid.
    """
    typed = parse_settings(settings)
    path = None if recipe is None else find_recipe(recipe)
    known = converted or (read_recipe(path) if path and converted is None else ())
    base = [x for x in known if x[0] not in dict(typed)]  # their values need not be valid
    cluster = dict([*base, *typed]).get("cluster")
    with _named(path):
        _refuse_doubles(base)
        before, base = base, expand_shorthands(base, [])
    written = {*dict(before), *(_split(word)[0] for word in settings)}
    typed = expand_shorthands(typed, base)
    given = {*dict(typed)}
    kept, dropped = _below(base, given)
    kept = without_missing(path, kept, given) if path else kept
    pairs, renamed = translate_strategy(merge_overrides([*kept, *typed]))
    with _named(path):
        from_recipe = {*dict(kept)}
        _each(_check_one, [pair for pair in pairs if pair[0] in from_recipe])
    values = option_values(choices := {x: text for x, text in pairs if x in GROUPS})
    parsed = {name: KEYS[name].parse(text) for name, text in pairs if name in KEYS}
    if on_checked:
        on_checked(to_config({**values, **parsed}, choices), path.stem if path else None)
    pairs = fetch_model_config(pairs, for_training=for_training)
    parsed |= {name: KEYS[name].parse(text) for name, text in pairs if name == "model.path"}
    of_model = model_values(choices, dict(pairs), values["model.config_json"])
    of_adapters = adapter_values(choices, dict(pairs), given)
    dropped += tuple(x for x, value in of_adapters.items() if parsed.get(x, value) != value)
    values |= of_model | parsed | of_adapters
    values["model.head_dim"] = of_model.get("model.head_dim")  # a number for `auto` too
    origins = dict.fromkeys(of_model | of_adapters, Origin.DERIVED)
    has_value = [x for x, _ in pairs if values.get(x, x) is not None or KEYS[x].is_selected]
    origins |= {x: Origin.RECIPE if x in from_recipe - given else Origin.TYPED for x in has_value}
    # Ranks by the cluster of a recipe are those of its option.
    origins |= dict.fromkeys({*RANK_KEYS} & from_recipe - written - given, Origin.OPTION)
    _resolve_alternatives(values, origins)
    origins |= dict.fromkeys(_autos(values, pairs), Origin.AUTO)
    of_options = dict.fromkeys((x for x, _ in option_settings(choices)), Origin.OPTION)
    config = replace(to_config(values, choices), origins=of_options | origins)
    if "data" not in written:
        config = config.changed({"data.is_inferred": True})
    return Composed(config, path.stem if path else None, dropped, renamed, cluster)


def _autos(values: Mapping[str, Value], pairs: Sequence[Setting]) -> Iterator[str]:
    yield from (name for name, value in values.items() if value is None and KEYS[name].auto)
    yield from (x for x, text in pairs if text == AUTO and x in KEYS and KEYS[x].is_selected)


def default_config() -> Config:
    """Return the configuration without any setting, before its model is read."""
    return to_config(option_values({}), {})


def parse_settings(words: Sequence[str]) -> list[Setting]:
    """Return settings of the command line as they were typed, after a check of each by itself.

    UsageError if settings are unknown or given twice, or values invalid; with a text of each.
    """
    # The word after an unknown option is its value.
    alone = [x for before, x in pairwise(["", *words]) if before[:2] != "--" or "=" in before + x]
    typed = _each(_checked, [(word,) for word in alone])
    _refuse_doubles(typed)
    return typed


def without_shorthands(typed: Mapping[str, str]) -> dict[str, str]:
    """Return settings of the command line with those that their short forms stand for."""
    return dict(expand_shorthands([*typed.items()], [("data", "")]))


def _checked(word: str) -> Setting:
    pair = _split(word)
    pairs, _ = translate_strategy(merge_overrides(expand_shorthands([pair], [("data", "")])))
    for name, text in pairs:
        _check_one(name, text)
    return pair


def _each(check: Callable[..., T], given: Sequence[tuple[str, ...]]) -> list[T]:
    """Return the result of a check of each, or raise a UsageError with a text for each mistake."""
    found, texts = list[T](), list[str]()
    for each in given:
        try:
            found.append(check(*each))
        except UsageError as error:
            texts += error.args
    if texts:
        more = len(texts) - _MOST_TOLD
        raise UsageError(*texts[:_MOST_TOLD], *([f"and {more} more mistakes"] if more > 0 else []))
    return found


@contextmanager
def _named(recipe: Path | None) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        texts = [f"{recipe}: {each}" if recipe else each for each in error.args]
        raise UsageError(*texts) from None


def _below(base: list[Setting], given: set[str]) -> tuple[list[Setting], tuple[str, ...]]:
    """Return the settings of a recipe that stay below those given, and the names of ignored ones.

    An option of a group on the command line replaces the recipe's, with the keys of that option.
    """
    chosen = given & set(GROUPS)
    dropped = tuple(
        name
        for name, _ in base
        if "." in name and name.split(".")[0] in chosen
        if name not in given and not name.startswith(FOR_ANY_OPTION)
    )
    return [pair for pair in base if pair[0] not in chosen and pair[0] not in dropped], dropped


def _split(word: str) -> Setting:
    name, equals, value = word.partition("=")
    name = name.strip()
    if word.startswith("-"):
        known = hint(name.lstrip("-").replace("-", "_"), [*KEYS, *GROUPS])
        if name in TRAIN_OPTIONS:
            raise UsageError(f"{name}: not an option of this command; `fsdpctl train` has it")
        way = f"settings have the form KEY=VALUE{known or hint(name, list(TRAIN_OPTIONS))}"
        raise UsageError(f"{word}: no such option; {way}")
    if name[:1] in ("+", "~") or "@" in name:
        problem = "adding and removing keys is not supported; `fsdpctl list` shows all keys"
        raise UsageError(f"{name}: {problem}")
    if not name:
        raise UsageError(f"{word!r}: expected KEY=VALUE")
    try:
        word.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{word!r}: not valid UTF-8; rename it, or set PYTHONUTF8=1") from None
    if name == "hydra" or name.startswith("hydra."):
        problem = "settings of Hydra are not supported; `fsdpctl list` shows all keys"
        raise UsageError(f"{name}: {problem}")
    if word.endswith(".toml") and name not in KEYS:
        raise UsageError(f"{word}: {NO_TOML}")
    if name in KEYS and KEYS[name].user_key:
        raise UsageError(f"{name}: no such key; set {KEYS[name].user_key}")
    if equals:
        return name, value
    if is_model_name(word):
        return "model", word
    if is_hub_name(word):
        way = f"if it is on the Hub, set model={word}"
        raise UsageError(f"{word}: unknown model{did_you_mean(word, hub_models())}; {way}")
    raise UsageError(f"{word}: expected KEY=VALUE, without spaces around the ={_meant_by(word)}")


def _meant_by(word: str) -> str:
    if word in KEYS or word in GROUPS:
        return ""
    if word in recipe_names():
        return f"; to use the recipe, pass --recipe {word}"
    for group in GROUPS:
        if word in choices_of(group):
            return f"; did you mean {group}={word}?"
    if word.endswith(".json"):
        return "; recipes are YAML files"
    if os.path.exists(word):
        return f"; to train on the text, pass data=text data.path={word}"
    return hint(word, [*KEYS, *GROUPS])


def _refuse_doubles(typed: Sequence[Setting]) -> None:
    seen: dict[str, str] = {}
    for name, value in typed:
        if name in seen:
            raise UsageError(f"{name}: given twice, as {seen[name]} and as {value}")
        seen[name] = value


def _check_one(name: str, text: str) -> None:
    if name in GROUPS:
        choices = choices_of(name)
        if (name, text) == ("data", "own") or (name == "model" and text.startswith(SCRIPT_PREFIX)):
            raise UsageError(f"{name}={text}: {NO_DECODER}")
        if text not in choices:
            problem = f"no such option{_choice_hint(name, text, choices)} ({', '.join(choices)})"
            raise UsageError(f"{name}={text}: {problem}")
    elif name in SECTIONS or any(key.startswith(f"{name}.") for key in KEYS):
        section = name.split(".")[0]
        raise UsageError(f"{name}: a section, not a key; `fsdpctl list {section}` shows its keys")
    elif name not in KEYS:
        raise UsageError(f"{name}: no such key{hint(name, [*KEYS, *GROUPS])}")
    else:
        KEYS[name].parse(text)


def _choice_hint(group: str, text: str, choices: Sequence[str]) -> str:
    if "," in text:
        simulate = " --simulate" if group == "cluster" else ""
        return f"; `fsdpctl compare{simulate}` takes several"
    if group == "model":
        if "/" in text or os.path.isdir(text):
            return f"; model={HF_OPTION} model.path={text} loads a directory"
        # llama4 is another model than llama3, however near the name.
        size = re.findall(r"\d+", text)
        same = [x for x in choices if x.startswith(text) or re.findall(r"\d+", x) == size]
        return hint(text, same) or f"; model={HF_OPTION} model.path=DIR loads another model"
    if group == "cluster" and (cards := clusters_with_memory(text)):
        return f"; GPUs of that size are {', '.join(cards)}; set one, such as cluster=2x{cards[0]}"
    if group == "cluster" and (same := clusters_like(text)):
        return f"; did you mean {' or '.join(same)}?"
    elsewhere = STRATEGY_ALIASES if group == "strategy" else ()
    return hint(text, [*choices, *elsewhere])


def _resolve_alternatives(values: dict[str, Value], origins: dict[str, Origin]) -> None:
    """Unset the alternatives to a length or a size that is typed, or else in the recipe."""
    subjects = {"the length": LENGTH_KEYS, "the size of a step": BATCH_SIZE_KEYS}
    for source, (subject, names) in product((Origin.TYPED, Origin.RECIPE), subjects.items()):
        found = [x for x in names if origins.get(x) is source and values[x] is not None]
        # In a file, these two mean the shorter length, as in other tools; typed, a mistake.
        is_both = source is Origin.RECIPE and found == ["train.steps", "train.epochs"]
        if len(found) > 1 and not is_both:
            raise UsageError(f"{' and '.join(found)}: conflict; set {subject} with one of them")
        for name in (each for each in names if found and each not in found):
            values[name] = None if KEYS[name].optional else values[name]
            origins.pop(name, None)
