"""The best variant as a recipe."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fsdpctl.config.compose import compose_config
from fsdpctl.config.keys import NONE, value_in
from fsdpctl.config.schema import GROUPS, KEYS, LENGTHS, SIZES, Config
from fsdpctl.config.serialize import config_words, words_for_others, words_to_yaml
from fsdpctl.errors import UsageError
from fsdpctl.tools.compare.vary import Variant

# What reads other values in with it, which are then none of the recipe's.
_SOURCES = ("model.path", "model.lora.path")


def check_recipe_file(path: Path) -> Path:
    """Where a recipe will be written to.

    Raises:
        UsageError: there is something, or it cannot be written.
    """
    path = path.expanduser()
    if path.exists() or path.is_symlink():
        raise UsageError(f"--write-recipe {path}: is there already")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise UsageError(f"--write-recipe {path}: {path.parent} cannot be written to")
    return path


def write_recipe(
    path: Path,
    variant: Variant,
    about: Sequence[str],
    *,
    recipe: str | None,
    config_dir: Path | None,
) -> None:
    """Write a variant down, without the length that compare gave it; `about` is what it says first.

    Raises:
        UsageError: the file is there by now, or cannot be written.
    """
    words = recipe_words(variant, recipe, config_dir)
    lines = [*about]
    if config_dir is not None:
        lines.append(f"It takes choices from --config-dir {config_dir}.")
    head = "".join(f"# {' '.join(line.split())}\n" for line in lines)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(head + words_to_yaml(words))
    except OSError as error:
        raise UsageError(f"--write-recipe {path}: {error.strerror}") from None


def recipe_words(
    variant: Variant, recipe: str | None = None, config_dir: Path | None = None
) -> dict[str, str]:
    """The words that differ from what would be without them, strategy and engine in any case.

    Commands are none of them: what is executed is typed.
    """
    config = compose_config(variant.words, recipe, config_dir).config
    if "strategy" in variant.varied:
        config = replace(config, strategy=config.strategy.under(config.strategy.name))
    ours, usual = words_for_others(config), config_words(_usual(config, config_dir))
    groups = {
        name: ours[name]
        for name in GROUPS
        if ours[name] != _defaults()[name] or name in ("strategy", "engine")
    }
    values = {n: text for n, text in ours.items() if n not in GROUPS and text != usual.get(n)}
    unset = {name: _written(config, name) for name in usual.keys() - ours.keys()}
    found = {**groups, **values, **{name: text for name, text in unset.items() if text}}
    order = [*GROUPS, *KEYS]
    return dict(sorted(found.items(), key=lambda pair: order.index(pair[0])))


def _usual(config: Config, config_dir: Path | None) -> Config:
    """What the choices of `config` give by themselves."""
    words = config_words(config)
    kept = [f"{name}={words[name]}" for name in (*GROUPS, *_SOURCES) if name in words]
    return compose_config(kept, None, config_dir).config


def _defaults() -> Mapping[str, str]:
    return config_words(Config())


def _written(config: Config, name: str) -> str:
    """How a key is typed that is as nobody set it; nothing where naming another one does that."""
    key = KEYS[name]
    if key.is_executed or name in (*LENGTHS, *SIZES):
        return ""
    value = value_in(getattr(config, name.split(".")[0]), name)
    return key.text(value) or (NONE if key.type != "text" else "")
