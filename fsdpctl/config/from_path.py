"""What `model.path` and `model.lora.path` say of a model: its shape, and its adapters'."""

from collections.abc import Mapping
from pathlib import Path

from fsdpctl.config.hub_cache import local_model
from fsdpctl.config.keys import Value
from fsdpctl.config.model_path import LORA_KEYS, SHAPE_KEYS, is_checkpoint, model_words
from fsdpctl.config.peft import ADAPTER_KEYS, adapter_words
from fsdpctl.config.schema import KEYS
from fsdpctl.config.serialize import known_key
from fsdpctl.errors import CheckpointError, UsageError

FROM_PATH = "hf"  # the choice of a model that a directory describes


def with_model(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """A name on the Hub, in `model.path`, made into the directory that has the model."""
    said = dict(pairs)
    if said.get("model") != FROM_PATH:
        return pairs
    weights = said.get("model.init") != "random"
    return [
        (name, local_model(text, weights=weights) if name == "model.path" else text)
        for name, text in pairs
    ]


def values_of_path(choices: Mapping[str, str], given: Mapping[str, str]) -> dict[str, Value]:
    """What the model in `model.path` is, where `model=hf` says so."""
    path = given.get("model.path")
    if choices.get("model") != FROM_PATH:
        for name in ("path", "init"):
            if given.get(f"model.{name}") not in (None, "auto", "random"):
                raise UsageError(
                    f"model.{name}={given[f'model.{name}']}: only with model={FROM_PATH}"
                )
        return {}
    if path is None:
        raise UsageError(f"model={FROM_PATH}: say which, as model.path=DIR")
    folder = str(KEYS["model.path"].parse(path))
    words = model_words(folder)
    try:
        values = {name: known_key(name).parse(text) for name, text in words.items()}
    except UsageError as error:
        refusal = CheckpointError if is_checkpoint(Path(folder)) else UsageError
        raise refusal(f"model.path={path}: {error}") from None
    fixed = SHAPE_KEYS + (LORA_KEYS if "model.lora.rank" in words else ())
    for name in fixed if given.get("model.init") != "random" else ():
        if name in given and values.get(name, KEYS[name].default) != KEYS[name].parse(given[name]):
            raise UsageError(
                f"{name}={given[name]}: the weights in model.path={path} are of "
                f"{words.get(name, 'another')}; model.init=random begins without them"
            )
    return values


def values_of_adapters(choices: Mapping[str, str], given: Mapping[str, str]) -> dict[str, Value]:
    """What the adapters in `model.lora.path` are, where they are given."""
    path = given.get("model.lora.path")
    if path is None:
        return {}
    if choices.get("model") != FROM_PATH:
        raise UsageError(
            f"model.lora.path={path}: only with model={FROM_PATH}, whose adapters it has"
        )
    words = adapter_words(str(KEYS["model.lora.path"].parse(path)))
    try:
        values = {name: KEYS[name].parse(text) for name, text in words.items()}
    except UsageError as error:
        raise UsageError(f"model.lora.path={path}: {error}") from None
    for name in ADAPTER_KEYS:
        if name in given and values[name] != KEYS[name].parse(given[name]):
            raise UsageError(
                f"{name}={given[name]}: those in model.lora.path={path} have {words[name]}"
            )
    return values
