"""The best variant as a recipe."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fsdpctl.config.compose import compose_config
from fsdpctl.config.keys import NONE, value_in
from fsdpctl.config.schema import GROUPS, KEYS, LENGTHS, SIZES, Config
from fsdpctl.config.serialize import config_words, words_for_others, words_to_yaml
from fsdpctl.errors import UsageError
from fsdpctl.tools.compare.vary import Variant

# Settings that bring other settings with them, which the recipe then omits.
_SOURCES = ("model.path", "model.lora.path")


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
    config_dir: Path | None,
) -> None:
    """Write a variant, without the length that compare set, after the comments `about`.

    Raises:
        UsageError: If the file exists by now, or cannot be written.
    """
    lines = [*about]
    if config_dir is not None:
        lines.append(f"It uses options from --config-dir {config_dir}.")
    head = "".join(f"# {' '.join(line.split())}\n" for line in lines)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(head + words_to_yaml(recipe_words(variant, recipe, config_dir)))
    except OSError as error:
        raise UsageError(f"--write-recipe {path}: {error.strerror}") from None


def recipe_words(
    variant: Variant, recipe: str | None = None, config_dir: Path | None = None
) -> dict[str, str]:
    """Return the settings that differ from the defaults, and always strategy and engine.

    Settings that are executed are left out: they must be given on the command line.
    """
    config = compose_config(variant.words, recipe, config_dir).config
    if "strategy" in variant.varied:
        config = replace(config, strategy=config.strategy.under(config.strategy.name))
    own, defaults = words_for_others(config), config_words(Config())
    groups = {
        name: own[name]
        for name in GROUPS
        if own[name] != defaults[name] or name in ("strategy", "engine")
    }
    usual = config_words(_usual(config, config_dir))
    values = {n: text for n, text in own.items() if n not in GROUPS and text != usual.get(n)}
    unset = {name: _unset_text(config, name) for name in usual.keys() - own.keys()}
    found = {**groups, **values, **{name: text for name, text in unset.items() if text}}
    order = [*GROUPS, *KEYS]
    return dict(sorted(found.items(), key=lambda pair: order.index(pair[0])))


def _usual(config: Config, config_dir: Path | None) -> Config:
    """Return the configuration that the selected group options alone result in."""
    words = config_words(config)
    kept = [f"{name}={words[name]}" for name in (*GROUPS, *_SOURCES) if name in words]
    return compose_config(kept, None, config_dir).config


def _unset_text(config: Config, name: str) -> str:
    """Return the text that unsets a key, or an empty string if another key does that."""
    key = KEYS[name]
    if key.is_executed or name in (*LENGTHS, *SIZES):
        return ""
    value = value_in(getattr(config, name.split(".")[0]), name)
    return key.text(value) or (NONE if key.type != "text" else "")
