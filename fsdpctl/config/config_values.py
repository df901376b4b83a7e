"""Checks of a config.json that transformers does not make, and the text of those that it makes."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from fsdpctl.errors import UsageError, nearest

# Where transformers looks for the text model in a configuration.
_PARTS = ("text_config", "decoder", "generator", "text_encoder")
# Keys about the file, which fsdpctl sets when it writes one, and their values.
_DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "auto")
_ABOUT = {"dtype": _DTYPES, "torch_dtype": _DTYPES, "use_cache": ("true", "false")}
# Of the errors of transformers' validators: the key, the type and the value; or what precedes them.
_FIELD = re.compile(r"Field '(\w+)' expected (\w+), got \w+ \(value: (.*)\)")
_VALIDATOR = re.compile(r"Class validation error for validator '\w+': \w+: ")
_TYPES = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}


def check_parts(content: Mapping[str, Any], where: str, parts: Collection[str]) -> None:
    """Check that nested configurations are those that the model has, and are mappings.

    Raises:
        UsageError: If they aren't.
    """
    for name in {*_PARTS, *parts} & content.keys():
        value = content[name]
        if value is not None and name not in parts:
            raise UsageError(
                f"{where}: {name}: not supported; {content.get('model_type')} has no such part"
            )
        if value is not None and not isinstance(value, Mapping):
            raise UsageError(f"{where}: {name}: expected a mapping, got {_shown(value)}")


def check_about(content: Mapping[str, Any], where: str) -> None:
    """Check the keys about the file, which nothing else reads; UsageError names one."""
    for name, known in _ABOUT.items():
        value = content.get(name)
        text = str(value).lower().removeprefix("torch.")
        if text not in (*known, "none") and not isinstance(value, Mapping):
            expected = f"{', '.join(known)}{nearest(text, known)}"
            raise UsageError(f"{where}: {name} {_shown(value)}: expected {expected}")


def rejection(error: Exception) -> str:
    """Return what transformers rejects: `KEY VALUE: expected TYPE`, or its own reason."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if found := _FIELD.search(reason):
        name, kind, value = found.groups()
        return f"{name} {_shown(value.strip(chr(39)))}: expected {_TYPES.get(kind, kind)}"
    return _VALIDATOR.sub("", reason)


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
