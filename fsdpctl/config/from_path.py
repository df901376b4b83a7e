"""The settings of the model in `model.path`, and of the adapters in `model.lora.path`."""

import json
from collections.abc import Mapping
from pathlib import Path

from fsdpctl.config.any_decoder import resized, words_of_content
from fsdpctl.config.hub_cache import local_model
from fsdpctl.config.hub_models import hub_models
from fsdpctl.config.keys import Value
from fsdpctl.config.model import TRANSFORMERS
from fsdpctl.config.model_path import CONFIG_KEYS, LORA_KEYS, SHAPE_KEYS, is_checkpoint, model_words
from fsdpctl.config.peft import ADAPTER_KEYS, adapter_words
from fsdpctl.config.schema import KEYS
from fsdpctl.config.serialize import known_key
from fsdpctl.errors import CheckpointError, UsageError

FROM_PATH = "hf"  # the option for a model that a directory describes
_FROM_PATHS = (FROM_PATH, TRANSFORMERS)  # the second sets model.module too


def with_model(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Replace a name on the Hub in `model.path` by its cached directory, if it has one."""
    given = dict(pairs)
    if given.get("model") not in _FROM_PATHS:
        return pairs
    weights = given.get("model.init") != "random"
    return [
        (name, _found(text, weights=weights) if name == "model.path" else text)
        for name, text in pairs
    ]


def _found(path: str, *, weights: bool) -> str:
    """Return the cached directory, or the name itself if the model's configuration is known."""
    try:
        return local_model(path, weights=weights)
    except UsageError:
        if path.partition("@")[0] in hub_models():
            return path
        raise


def values_of_path(choices: Mapping[str, str], given: Mapping[str, str]) -> dict[str, Value]:
    """Return the settings of the model in `model.path` if `model` reads one."""
    path, option = given.get("model.path"), choices.get("model")
    if option not in _FROM_PATHS:
        for name in ("path", "init", "module"):
            if given.get(f"model.{name}") not in (None, "auto", "random"):
                raise UsageError(
                    f"model.{name}={given[f'model.{name}']}: only valid with model={FROM_PATH}"
                )
        return {}
    if path is None:
        raise UsageError(f"model={option}: model.path is required, such as model.path=DIR")
    folder = str(KEYS["model.path"].parse(path))
    usual = TRANSFORMERS if option == TRANSFORMERS else "auto"
    module = str(KEYS["model.module"].parse(given.get("model.module", usual)))
    words = model_words(folder, module)
    is_random = given.get("model.init") == "random"
    if is_random and words.get("model.architecture") == TRANSFORMERS:
        words |= _resized(words, given, path)
    try:
        values = {name: known_key(name).parse(text) for name, text in words.items()}
    except UsageError as error:
        refusal = CheckpointError if is_checkpoint(Path(folder)) else UsageError
        raise refusal(f"model.path={path}: {error}") from None
    _check_given(given, words, values, path, is_random=is_random)
    return values


def _resized(words: Mapping[str, str], given: Mapping[str, str], path: str) -> dict[str, str]:
    """Return the settings of a model of transformers with the given sizes."""
    changed = {
        name.removeprefix("model."): KEYS[name].parse(text)
        for name, text in given.items()
        if name in words and name not in (*LORA_KEYS, "model.config_json", "model.architecture")
    }
    content = resized(json.loads(words["model.config_json"]), changed, f"model.path={path}")
    found = words_of_content(content, f"model.path={path}", TRANSFORMERS)
    return {f"model.{name}": text for name, text in found.items()}


def _check_given(
    given: Mapping[str, str],
    words: Mapping[str, str],
    values: Mapping[str, Value],
    path: str,
    *,
    is_random: bool,
) -> None:
    """Check that no setting contradicts the weights, or the config.json of transformers' module."""
    is_foreign = words.get("model.architecture") == TRANSFORMERS
    fixed = () if is_random else SHAPE_KEYS + (LORA_KEYS if "model.lora.rank" in words else ())
    for name in (*fixed, *(CONFIG_KEYS if is_foreign else ())):
        if name in given and values.get(name, KEYS[name].default) != KEYS[name].parse(given[name]):
            of, way_on = "weights", "set model.init=random to ignore them"
            if name not in fixed:
                of, way_on = "config.json", "edit it"
            raise UsageError(
                f"{name}={given[name]}: conflicts with the {of} in model.path={path} of "
                f"{words.get(name, 'another value')}; {way_on}"
            )


def values_of_adapters(choices: Mapping[str, str], given: Mapping[str, str]) -> dict[str, Value]:
    """Return the settings of the adapters in `model.lora.path`, if it is set."""
    path = given.get("model.lora.path")
    if path is None:
        return {}
    if choices.get("model") not in _FROM_PATHS:
        raise UsageError(f"model.lora.path={path}: only valid with model={FROM_PATH}")
    words = adapter_words(str(KEYS["model.lora.path"].parse(path)))
    try:
        values = {name: KEYS[name].parse(text) for name, text in words.items()}
    except UsageError as error:
        raise UsageError(f"model.lora.path={path}: {error}") from None
    for name in ADAPTER_KEYS:
        if name in given and values[name] != KEYS[name].parse(given[name]):
            raise UsageError(f"{name}={given[name]}: model.lora.path={path} has {words[name]}")
    return values
