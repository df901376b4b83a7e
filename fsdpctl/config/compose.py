"""Composition of a `Config` from settings, a recipe and the options in conf/.

Hydra composes the options. Hydra's grammar never parses values, so values can be any file name.
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
from fsdpctl.config.model import NO_DECODER, SCRIPT_DATA, SCRIPT_PREFIX
from fsdpctl.config.model_path import HF_OPTION, adapter_values, fetch_model_config, model_values
from fsdpctl.config.options import option_settings, option_values, options_of
from fsdpctl.config.overrides import merge_overrides
from fsdpctl.config.recipe import NO_TOML, find_recipe, read_recipe, recipe_names, without_missing
from fsdpctl.config.schema import BATCH_KEYS, GROUPS, KEYS, LENGTH_KEYS, SECTIONS, Config, Origin
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
_MAX_MISTAKES = 10  # mistakes that one command reports
T = TypeVar("T")

# Keys that keep their values if another option of their group is selected.
FOR_ANY_OPTION = ("model.lora.", "model.base_dtype", "data.val_fraction", "strategy.offload")

OnChecked = Callable[[Config, str | None], None]  # receives the configuration and the recipe's name


@dataclass(frozen=True, slots=True)
class Composed:
    """The requested configuration, and how it was composed."""

    config: Config
    recipe: str | None = None  # the name of the recipe, without directory and suffix
    ignored_keys: tuple[str, ...] = ()  # recipe keys that another option replaces
    renamed: tuple[str, ...] = ()  # a line for each option that has another tool's name
    cluster: str | None = None  # the text of `cluster`, such as 8xh100

    @property
    def ignored_lines(self) -> tuple[str, ...]:
        """A line for each ignored key of the recipe, with the reason."""
        lines = []
        for key in self.ignored_keys:
            reason = f"{key.split('.')[0]} is set on the command line"
            reason = "model.lora.path sets it" if key.startswith("model.lora.") else reason
            lines.append(f"{key} of the recipe ignored: {reason}")
        return tuple(lines)


def compose_config(
    settings: Sequence[str],
    recipe: str | None = None,
    *,
    converted: Sequence[Setting] | None = None,
    on_checked: OnChecked | None = None,
    for_training: bool = False,
) -> Composed:
    """Return the configuration of `settings` (KEY=VALUE) and a recipe.

    If the recipe is the file of another tool, `converted` has its translated settings. `on_checked`
    is called before the model is read, since reading the model may import torch. `for_training` is
    passed to `fetch_model_config`. UsageError if a setting is unknown, set twice or invalid.
    """
    typed = parse_settings(settings)
    path = None if recipe is None else find_recipe(recipe)
    recipe_name = path.stem if path else None
    in_file = read_recipe(path) if path and converted is None else converted or ()
    in_recipe = [x for x in in_file if x[0] not in dict(typed)]  # replaced values may be invalid
    written = dict([*in_recipe, *typed])
    with _with_location(path):
        _refuse_duplicates(in_recipe)
        in_recipe = expand_shorthands(in_recipe, [])
    typed = expand_shorthands(typed, in_recipe)
    typed_keys = {*dict(typed)}
    in_recipe, ignored_keys = _split_ignored(in_recipe, typed_keys)
    in_recipe = without_missing(path, in_recipe, typed_keys) if path else in_recipe
    pairs, renamed = translate_strategy(merge_overrides([*in_recipe, *typed]))
    with _with_location(path):
        _check_all(_check_pair, [pair for pair in pairs if pair[0] in dict(in_recipe)])
    choices = {name: text for name, text in pairs if name in GROUPS}
    values = option_values(choices)
    parsed = {name: KEYS[name].parse(text) for name, text in pairs if name in KEYS}
    if on_checked:
        on_checked(to_config({**values, **parsed}, choices), recipe_name)
    pairs = fetch_model_config(pairs, for_training=for_training)  # changes a name on the Hub
    parsed |= {name: KEYS[name].parse(text) for name, text in pairs if name == "model.path"}
    model = model_values(choices, dict(pairs), values["model.config_json"])
    adapters = adapter_values(choices, dict(pairs), typed_keys)
    ignored_keys += [x for x, value in adapters.items() if parsed.get(x, value) != value]
    values |= model | parsed | adapters
    values["model.head_dim"] = model.get("model.head_dim")  # `parsed` has None for `auto`
    origins = dict.fromkeys(dict(option_settings(choices)), Origin.OPTION)
    origins |= dict.fromkeys(model | adapters, Origin.DERIVED)
    recipe_keys = {*dict(in_recipe)} - typed_keys
    has_value = (x for x, _ in pairs if values.get(x) is not None or _may_be_none(x))
    origins |= {x: Origin.RECIPE if x in recipe_keys else Origin.TYPED for x in has_value}
    # A recipe with cluster=8xh100 sets no ranks itself; they belong to the option of the cluster.
    origins |= dict.fromkeys({*RANK_KEYS} & recipe_keys - written.keys(), Origin.OPTION)
    _resolve_alternatives(values, origins)
    origins |= dict.fromkeys(_auto_keys(values, pairs), Origin.AUTO)
    values["data.is_inferred"] = "data" not in written
    config = replace(to_config(values, choices), origins=origins)
    return Composed(config, recipe_name, tuple(ignored_keys), renamed, written.get("cluster"))


def _may_be_none(name: str) -> bool:
    return name in GROUPS or KEYS[name].auto_and_none


def _auto_keys(values: Mapping[str, Value], pairs: Sequence[Setting]) -> Iterator[str]:
    """Yield keys that `auto` selects: stored as None or, if None is a value, typed as `auto`."""
    yield from (name for name, value in values.items() if value is None and KEYS[name].auto)
    yield from (x for x, text in pairs if text == AUTO and x in KEYS and KEYS[x].auto_and_none)


def default_config() -> Config:
    """Return the default configuration, without reading the default model."""
    return to_config(option_values({}), {})


def parse_settings(args: Sequence[str]) -> list[Setting]:
    """Check each setting of the command line, and return the settings as they were typed.

    UsageError with a message for each setting that is unknown, set twice or has an invalid value.
    """
    # The argument after an unknown --OPTION is its value, which needs no second message.
    settings = [x for opt, x in pairwise(["", *args]) if opt[:2] != "--" or "=" in opt or "=" in x]
    typed = _check_all(_parse_setting, [(text,) for text in settings])
    _refuse_duplicates(typed)
    return typed


def without_shorthands(typed: Mapping[str, str]) -> dict[str, str]:
    """Return settings of the command line with shorthands replaced by full settings."""
    # A recipe that sets `data` keeps data.path from selecting the option.
    return dict(expand_shorthands([*typed.items()], [("data", "")]))


def _parse_setting(setting: str) -> Setting:
    name, text = _split_setting(setting)
    pairs, _ = translate_strategy(merge_overrides([*without_shorthands({name: text}).items()]))
    for pair in pairs:
        _check_pair(*pair)
    return name, text


def _check_all(check: Callable[..., T], arguments: Sequence[tuple[str, ...]]) -> list[T]:
    """Return the results of a check; UsageError with a message for each argument that fails."""
    results, messages = list[T](), list[str]()
    for each in arguments:
        try:
            results.append(check(*each))
        except UsageError as error:
            messages += error.args
    if messages:
        more = len(messages) - _MAX_MISTAKES
        summary = [f"and {more} more mistakes"] if more > 0 else []
        raise UsageError(*messages[:_MAX_MISTAKES], *summary)
    return results


@contextmanager
def _with_location(recipe: Path | None) -> Iterator[None]:
    """Prefix messages with the file of the recipe."""
    try:
        yield
    except UsageError as error:
        raise UsageError(*(f"{recipe}: {x}" if recipe else x for x in error.args)) from None


def _split_ignored(recipe: list[Setting], typed_keys: set[str]) -> tuple[list[Setting], list[str]]:
    """Return the settings of a recipe that apply, and the keys of ignored settings.

    If the command line selects an option of a group, it replaces the option and the keys that the
    recipe sets for this group, except for `FOR_ANY_OPTION`.
    """
    groups = typed_keys & {*GROUPS}
    ignored_keys = [
        name
        for name, _ in recipe
        if "." in name and name.split(".")[0] in groups
        if name not in typed_keys and not name.startswith(FOR_ANY_OPTION)
    ]
    return [x for x in recipe if x[0] not in (*groups, *ignored_keys)], ignored_keys


def _split_setting(text: str) -> Setting:
    name, equals, value = text.partition("=")
    name = name.strip()
    if text.startswith("-"):
        suggestion = hint(name.lstrip("-").replace("-", "_"), [*KEYS, *GROUPS])
        if name in TRAIN_OPTIONS:
            raise UsageError(f"{name}: not an option here; `fsdpctl train` has this option")
        advice = f"settings have the form KEY=VALUE{suggestion or hint(name, list(TRAIN_OPTIONS))}"
        raise UsageError(f"{text}: no such option; {advice}")
    is_hydra = name == "hydra" or name.startswith("hydra.")
    if is_hydra or name[:1] in ("+", "~") or "@" in name:
        subject = "settings of Hydra are" if is_hydra else "adding and removing keys is"
        raise UsageError(f"{name}: {subject} not supported; `fsdpctl list` shows all keys")
    if not name:
        raise UsageError(f"{text!r}: expected KEY=VALUE")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{text!r}: not valid UTF-8; rename it, or set PYTHONUTF8=1") from None

    if text.endswith(".toml") and name not in KEYS:
        raise UsageError(f"{text}: {NO_TOML}")
    if name in KEYS and KEYS[name].user_key:
        raise UsageError(f"{name}: no such key; set {KEYS[name].user_key}")
    if equals:
        return name, value
    if is_model_name(text):
        return "model", text
    if is_hub_name(text):
        advice = f"if it is on the Hub, set model={text}"
        raise UsageError(f"{text}: unknown model{did_you_mean(text, hub_models())}; {advice}")
    raise UsageError(f"{text}: expected KEY=VALUE, without spaces around the ={_suggestion(text)}")


def _suggestion(text: str) -> str:
    if text in KEYS or text in GROUPS:
        return ""
    if text in recipe_names():
        return f"; to use the recipe, pass --recipe {text}"
    for group in GROUPS:
        if text in options_of(group):
            return f"; did you mean {group}={text}?"
    if text.endswith(".json"):
        return "; recipes are YAML files"
    if os.path.exists(text):
        return f"; to train on the text, pass data=text data.path={text}"
    return hint(text, [*KEYS, *GROUPS])


def _refuse_duplicates(typed: Sequence[Setting]) -> None:
    seen: dict[str, str] = {}
    for name, value in typed:
        if name in seen:
            raise UsageError(f"{name}: set twice, as {seen[name]} and as {value}")
        seen[name] = value


def _check_pair(name: str, text: str) -> None:
    if name in GROUPS:
        choices = options_of(name)
        is_script_model = name == "model" and text.startswith(SCRIPT_PREFIX)
        if is_script_model or (name, text) == ("data", SCRIPT_DATA):
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
        # Suggest only models of the same number: llama3 for llama4 would be wrong.
        size = re.findall(r"\d+", text)
        similar = [x for x in choices if x.startswith(text) or re.findall(r"\d+", x) == size]
        return hint(text, similar) or f"; model={HF_OPTION} model.path=DIR loads another model"
    if group == "cluster" and (names := clusters_with_memory(text)):
        return f"; GPUs of that size are {', '.join(names)}; set one, such as cluster=2x{names[0]}"
    if group == "cluster" and (similar := clusters_like(text)):
        return f"; did you mean {' or '.join(similar)}?"
    aliases = STRATEGY_ALIASES if group == "strategy" else ()
    return hint(text, [*choices, *aliases])


def _resolve_alternatives(values: dict[str, Value], origins: dict[str, Origin]) -> None:
    """Keep one length and one batch size: the typed one, else the recipe's.

    UsageError if two of the same source conflict.
    """
    subjects = {"the length": LENGTH_KEYS, "the size of a step": BATCH_KEYS}
    for source, (subject, names) in product((Origin.TYPED, Origin.RECIPE), subjects.items()):
        set_names = [x for x in names if origins.get(x) is source and values[x] is not None]
        # As in other tools, steps and epochs in a file mean the shorter length.
        allows_both = source is Origin.RECIPE and set_names == ["train.steps", "train.epochs"]
        if len(set_names) > 1 and not allows_both:
            raise UsageError(f"{' and '.join(set_names)}: conflict; set {subject} with one of them")
        for name in (each for each in names if set_names and each not in set_names):
            values[name] = None if KEYS[name].optional else values[name]
            origins.pop(name, None)
