"""Expansion of settings with commas into variants, and the best variant as a recipe."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from fsdpctl.config.compose import Composed, compose_config
from fsdpctl.config.keys import NONE, value_in
from fsdpctl.config.recipe import find_recipe, read_recipe
from fsdpctl.config.schema import GROUPS, KEYS, LENGTHS, SIZES, Config, PrecisionConfig
from fsdpctl.config.serialize import config_words, words_for_others, words_to_yaml
from fsdpctl.errors import UsageError
from fsdpctl.io.files import refusing
from fsdpctl.plan.strategy import STRATEGIES, has_strategy
from fsdpctl.resolve.machine import shares_memory
from fsdpctl.tools.compare.row import Row

_SET_BY_COMPARE = dict.fromkeys(LENGTHS, "pass --steps to set the length of each run") | {
    "train.run_dir": "pass --out to keep the runs"
}
# Settings that bring other settings with them, which the recipe then omits.
_SOURCES = ("model.path", "model.lora.path")


@dataclass(frozen=True, slots=True)
class Variant:
    """A configuration to compare with others."""

    varied: dict[str, str]  # the settings that differ between variants
    composed: Composed
    words: tuple[str, ...] = ()  # all settings on the command line, without its length

    @property
    def row(self) -> Row:
        """A row without results."""
        config = self.composed.config
        return Row(self.varied, config.strategy.name, config.engine.name)


def variants(words: Sequence[str], recipe: str | None, *, steps: int) -> list[Variant]:
    """Return every combination of the alternatives in `words`; without any, all strategies.

    Commas separate alternatives of group options and numbers; in texts, such as paths, they have no
    meaning. If strategies vary, each variant ignores values that its strategy does not use. If
    engines vary and no strategy is set, strategies vary too: none of PyTorch's engines has all.

    Raises:
        UsageError: If a setting is unknown, or its value is invalid.
    """
    for word in words:
        name = word.partition("=")[0]
        if name in _SET_BY_COMPARE:
            raise UsageError(f"{name}: not supported by compare; {_SET_BY_COMPARE[name]}")
    alternatives = {
        name: list(dict.fromkeys(text.split(",")))
        for name, equals, text in (word.partition("=") for word in words)
        if equals and "," in text and _has_alternatives(name)
    }
    for name, texts in alternatives.items():
        if "" in texts:
            raise UsageError(f"{name}={','.join(texts)}: empty alternative between commas")
    names = [word.partition("=")[0] for word in words]
    if len(names) != len(set(names)):  # raises an error that names both
        compose_config(words, recipe)
    given = [] if recipe is None else read_recipe(find_recipe(recipe))
    between_engines = "engine" in alternatives and "strategy" not in dict(given)
    if "strategy" not in names and (between_engines or not alternatives):
        alternatives = {"strategy": list(STRATEGIES), **alternatives}
    fixed = [word for word in words if word.partition("=")[0] not in alternatives]
    return [
        _variant(dict(zip(alternatives, values, strict=True)), fixed, recipe, steps)
        for values in product(*alternatives.values())
    ]


OVER_GLOO = "launch.share_memory=false"


def share_alike(found: Sequence[Variant], place: Callable[[Config], Config]) -> bool:
    """Return whether strategies vary that would not differ, because ranks would share memory.

    `place` is `placed_here`, or for simulations `placed_on_cluster`.
    """
    configs = [each.composed.config for each in found]
    strategies = {each.strategy.name for each in configs}
    return len(strategies) > 1 and any(
        each.launch.share_memory is None
        and shares_memory(place(replace(each, precision=PrecisionConfig())))
        for each in configs
    )


def distinct(found: Sequence[Variant]) -> tuple[list[Variant], list[str]]:
    """Return the variants that run differently, and a line for each duplicate.

    A strategy that keeps unsharded parameters gathers none, so prefetching has no effect on it.
    """
    kept: dict[frozenset[tuple[str, str]], Variant] = {}
    lines = []
    for each in found:
        config = each.composed.config
        name = config.strategy.name
        gathers = name not in STRATEGIES or STRATEGIES[name].shards_params  # unknown: `auto`
        words = frozenset(
            (name, text)
            for name, text in config_words(config).items()
            if gathers or not name.startswith("prefetch")
        )
        first = kept.setdefault(words, each)
        if first is not each:
            lines.append(f"{each.row.label}: skipped, runs the same as {first.row.label}")
    return list(kept.values()), lines


def possible(found: Sequence[Variant]) -> tuple[list[Variant], list[str]]:
    """Return the variants whose engine has their strategy, and a line about the others.

    A single variant is kept, so that running it reports the error.

    Raises:
        UsageError: If none is left.
    """
    if len(found) < 2:
        return list(found), []
    kept, lacking = [], dict[str, list[str]]()
    for each in found:
        engine, strategy = each.composed.config.engine.name, each.composed.config.strategy.name
        if strategy not in STRATEGIES or has_strategy(engine, STRATEGIES[strategy]):
            kept.append(each)
        elif strategy not in lacking.setdefault(engine, []):
            lacking[engine].append(strategy)
    problem = "; ".join(
        f"engine={engine} does not support {', '.join(names)}" for engine, names in lacking.items()
    )
    if not kept:
        raise UsageError(problem)
    return kept, [f"skipped: {problem}"] if problem else []


def _variant(
    varied: dict[str, str], fixed: Sequence[str], recipe: str | None, steps: int
) -> Variant:
    words = (*fixed, *(f"{name}={text}" for name, text in varied.items()))
    composed = compose_config([*words, f"train.steps={steps}"], recipe)
    config = composed.config
    if "strategy" in varied:
        given = config.strategy
        config = replace(config, strategy=given.under(given.name))
    return Variant(varied, replace(composed, config=config), words)


def _has_alternatives(name: str) -> bool:
    if name in GROUPS:
        return True
    return name in KEYS and (KEYS[name].type != "text" or bool(KEYS[name].choices))


def check_recipe_file(path: Path) -> Path:
    """Return the path to write a recipe to.

    Raises:
        UsageError: If it exists or cannot be written.
    """
    path = path.expanduser()
    if path.exists() or path.is_symlink():
        raise UsageError(f"--write-recipe {path}: already exists")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise UsageError(f"--write-recipe {path}: directory {path.parent} is not writable")
    return path


def write_recipe(
    path: Path,
    variant: Variant,
    about: Sequence[str],
    *,
    recipe: str | None,
) -> None:
    """Write a variant, without the length that compare set, after the comments `about`.

    Raises:
        UsageError: If the file exists by now, or cannot be written.
    """
    head = "".join(f"# {' '.join(line.split())}\n" for line in about)
    words = recipe_words(variant, recipe)
    with refusing(f"--write-recipe {path}"), path.open("x", encoding="utf-8") as file:
        file.write(head + words_to_yaml(words))


def recipe_words(variant: Variant, recipe: str | None = None) -> dict[str, str]:
    """Return the settings that differ from the defaults, and always strategy and engine.

    Settings that are executed are left out: they must be given on the command line.
    """
    config = compose_config(variant.words, recipe).config
    if "strategy" in variant.varied:
        config = replace(config, strategy=config.strategy.under(config.strategy.name))
    own, defaults = words_for_others(config), config_words(Config())
    groups = {
        name: own[name]
        for name in GROUPS
        if own[name] != defaults[name] or name in ("strategy", "engine")
    }
    usual = config_words(_usual(config))
    values = {n: text for n, text in own.items() if n not in GROUPS and text != usual.get(n)}
    unset = {name: _unset_text(config, name) for name in usual.keys() - own.keys()}
    found = {**groups, **values, **{name: text for name, text in unset.items() if text}}
    order = [*GROUPS, *KEYS]
    return dict(sorted(found.items(), key=lambda pair: order.index(pair[0])))


def _usual(config: Config) -> Config:
    """Return the configuration that the selected group options alone result in."""
    words = config_words(config)
    kept = [f"{name}={words[name]}" for name in (*GROUPS, *_SOURCES) if name in words]
    return compose_config(kept).config


def _unset_text(config: Config, name: str) -> str:
    """Return the text that unsets a key, or an empty string if another key does that."""
    key = KEYS[name]
    if key.is_executed or name in (*LENGTHS, *SIZES):
        return ""
    value = value_in(getattr(config, name.split(".")[0]), name)
    return key.text(value) or (NONE if key.type != "text" else "")
