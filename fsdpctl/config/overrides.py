"""The key `model.overrides`: values that are merged into a model's config.json."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdpctl.config.decoder_config import canonical_json, known_names, read_hf_config
from fsdpctl.config.recipe import read_recipe
from fsdpctl.errors import UsageError, did_you_mean
from fsdpctl.io.untrusted import parse_json

OVERRIDES_KEY = "model.overrides"
_ROPE, _OLD_ROPE = "rope_parameters", "rope_scaling"  # the names in transformers 5 and before


def read_run_config(file: Path) -> dict[str, str]:
    """Return the settings in the config.yaml of a run, with merged overrides."""
    return dict(merge_overrides(read_recipe(file)))


def merge_overrides(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Merge settings such as `model.overrides.KEY.KEY` into one `model.overrides` with JSON.

    UsageError if one setting sets a value in a mapping that another setting replaces.
    """
    inside = [(name, text) for name, text in pairs if name.startswith(f"{OVERRIDES_KEY}.")]
    if not inside:
        return [*pairs]
    content = parse_json(dict(pairs).get(OVERRIDES_KEY, "{}"), dict[str, Any], OVERRIDES_KEY)
    for name, text in inside:
        *path, last = name.split(".")[2:]
        mapping = content
        for key in path:
            mapping = mapping.setdefault(key, {}) if isinstance(mapping, dict) else mapping
        if not isinstance(mapping, dict) or last in mapping:
            raise UsageError(f"{name}: conflicts with another of {OVERRIDES_KEY}; set one of them")
        mapping[last] = _value(text)
    rest = [pair for pair in pairs if pair not in inside and pair[0] != OVERRIDES_KEY]
    return [*rest, (OVERRIDES_KEY, canonical_json(content))]


def _value(text: str) -> Any:
    """Return the value of a text: a number, true, false, null, a list of such values, or text."""
    try:
        value = parse_json(text, object, OVERRIDES_KEY)
    except UsageError:
        return text
    if isinstance(value, list):
        return [_value(each) if isinstance(each, str) else each for each in value]
    return text if isinstance(value, str) else value


def apply_overrides(content: Mapping[str, Any], changes: str, location: str) -> dict[str, Any]:
    """Return the content of a config.json with `changes`, the JSON of `model.overrides`.

    UsageError if the configuration class of the model in transformers has no such key.
    """
    overrides = parse_json(changes, dict[str, Any], OVERRIDES_KEY)
    model_type = overrides.get("model_type", content["model_type"])
    keys = known_names(read_hf_config({**content, "model_type": model_type}, location))
    rope_key, other_key = (_ROPE, _OLD_ROPE) if _ROPE in content else (_OLD_ROPE, _ROPE)
    overrides = {rope_key if x == other_key else x: value for x, value in overrides.items()}
    if rope_key == _ROPE and "rope_theta" in overrides:
        overrides.setdefault(_ROPE, {})["rope_theta"] = overrides.pop("rope_theta")
    if overrides.get(rope_key, "") is None:  # null: no scaling
        overrides[rope_key] = {"rope_type": "default"}
    result = _merged(content, overrides, keys, OVERRIDES_KEY)
    rope = result.get(rope_key)
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else ""
    if kind in (None, "default") and "factor" in (overrides.get(rope_key) or {}):
        advice = f"expected {OVERRIDES_KEY}.{_OLD_ROPE}.rope_type too, such as linear or yarn"
        raise UsageError(f"{OVERRIDES_KEY}.{_OLD_ROPE}.factor: the model has no scaling; {advice}")
    return result


def _merged(
    content: Mapping[str, Any],
    changes: Mapping[str, Any],
    keys: Mapping[str, Collection[str]],
    location: str,
) -> dict[str, Any]:
    """Return `content` with `changes`, recursively. If `keys` is empty, each name is allowed."""
    result = dict(content)
    for name, value in changes.items():
        if keys and name not in keys:
            raise UsageError(f"{location}.{name}: no such key{did_you_mean(name, [*keys])}")
        if isinstance(value, dict):
            current = content[name] if isinstance(content.get(name), dict) else {}
            inner = dict.fromkeys([*current, *keys.get(name, ())], keys.get(name, ()))
            result[name] = _merged(current, value, inner, f"{location}.{name}")
        else:
            is_float = isinstance(content.get(name), float) and type(value) is int
            result[name] = float(value) if is_float else value
    return result
