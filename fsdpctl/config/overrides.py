"""The key `model.overrides`: values that are merged into a model's config.json."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdpctl.config.decoder_config import canonical_json, known_names, read_configuration
from fsdpctl.config.recipe import read_recipe
from fsdpctl.errors import UsageError, did_you_mean
from fsdpctl.io.untrusted import parse_json

OVERRIDES_KEY = "model.overrides"
_ROPE, _OLD_ROPE = "rope_parameters", "rope_scaling"  # a file has one of these names


def read_run_config(file: Path) -> dict[str, str]:
    """Return the settings in the config.yaml of a run, with all overrides as one."""
    return dict(merge_overrides(read_recipe(file)))


def merge_overrides(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Replace settings such as `model.overrides.KEY.KEY` by one with all of them, as JSON.

    UsageError if one sets a value in a mapping, and another one the mapping.
    """
    inside = [(name, text) for name, text in pairs if name.startswith(f"{OVERRIDES_KEY}.")]
    if not inside:
        return [*pairs]
    content = parse_json(dict(pairs).get(OVERRIDES_KEY, "{}"), dict[str, Any], OVERRIDES_KEY)
    for name, text in inside:
        at, (*path, last) = content, name.split(".")[2:]
        for word in path:
            at = at.setdefault(word, {}) if isinstance(at, dict) else at
        if not isinstance(at, dict) or last in at:
            raise UsageError(f"{name}: conflicts with another of {OVERRIDES_KEY}; set one of them")
        at[last] = _value(text)
    others = [pair for pair in pairs if pair not in inside and pair[0] != OVERRIDES_KEY]
    return [*others, (OVERRIDES_KEY, canonical_json(content))]


def _value(text: str) -> Any:
    """Return what a text means: a number, true, false, null, a list of these, or text."""
    try:
        found = parse_json(text, object, OVERRIDES_KEY)
    except UsageError:
        return text
    if isinstance(found, list):
        return [_value(each) if isinstance(each, str) else each for each in found]
    return text if isinstance(found, str) else found


def apply_overrides(content: Mapping[str, Any], changes: str, where: str) -> dict[str, Any]:
    """Return the content of a config.json with changes, which are JSON.

    UsageError if a key is unknown to transformers' class of such models.
    """
    given = parse_json(changes, dict[str, Any], OVERRIDES_KEY)
    family = given.get("model_type", content["model_type"])
    known = known_names(read_configuration({**content, "model_type": family}, where))
    named, other = (_ROPE, _OLD_ROPE) if _ROPE in content else (_OLD_ROPE, _ROPE)
    given = {named if name == other else name: value for name, value in given.items()}
    if named == _ROPE and "rope_theta" in given:
        given.setdefault(_ROPE, {})["rope_theta"] = given.pop("rope_theta")
    if given.get(named, "") is None:
        given[named] = {"rope_type": "default"}
    found = _merged(content, given, known, OVERRIDES_KEY)
    rope = found.get(named)
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else ""
    if kind in (None, "default") and "factor" in (given.get(named) or {}):
        way = f"expected {OVERRIDES_KEY}.{_OLD_ROPE}.rope_type too, such as linear or yarn"
        raise UsageError(f"{OVERRIDES_KEY}.{_OLD_ROPE}.factor: the model has no scaling; {way}")
    return found


def _merged(
    content: Mapping[str, Any],
    changes: Mapping[str, Any],
    known: Mapping[str, Collection[str]],
    place: str,
) -> dict[str, Any]:
    found = dict(content)
    for name, value in changes.items():
        if known and name not in known:
            raise UsageError(f"{place}.{name}: no such key{did_you_mean(name, [*known])}")
        if isinstance(value, dict):
            here = content.get(name)
            here = here if isinstance(here, dict) else {}
            inner = dict.fromkeys([*here, *known.get(name, ())], known.get(name, ()))
            found[name] = _merged(here, value, inner, f"{place}.{name}")
        else:
            is_real = isinstance(content.get(name), float) and type(value) is int
            found[name] = float(value) if is_real else value
    return found
