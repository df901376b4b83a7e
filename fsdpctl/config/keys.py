"""Configuration keys: type, allowed values, meaning, and conversion from text."""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from fsdpctl.errors import UsageError, did_you_mean
from fsdpctl.io.texts import refuse_credentials

AUTO, NONE = "auto", "none"
_LARGEST_WHOLE = 2**53  # floats such as 1e3 represent whole numbers exactly up to this limit
Setting = tuple[str, str]  # the name of a key or group, and the text of its value
Settings = Mapping[str, str]  # texts by name
Value = str | int | float | bool | None  # None: `auto`, or not set if the key is optional


@dataclass(frozen=True, slots=True)
class Key:
    """A configuration key."""

    name: str  # SECTION.FIELD
    type: Literal["text", "whole number", "number", "true or false"]
    default: Value
    meaning: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    within: tuple[float, float] | None = None  # lower and upper limit; replaces `minimum`
    auto: bool = False  # whether `auto` is allowed; stored as None
    auto_and_none: bool = False  # `auto` and `none`, stored as None; `auto` has `Origin.AUTO`
    optional: bool = False  # whether the key may be unset
    is_path: bool = False
    is_list: bool = False  # whether a recipe may have a YAML list
    # Returns the normalized text of a list; raises UsageError.
    normalize: Callable[[str], str] | None = None
    user_key: str = ""  # for an internal key, which only config.yaml has: the key that users set
    is_mapping: bool = False  # whether it is JSON, set as KEY.NAME=VALUE or as a YAML mapping
    unit: str = ""  # the unit of a number that can also be set as a size such as 80GB

    @property
    def allowed(self) -> str:
        """The allowed values, for tables of keys."""
        text = ", ".join(self.choices) or ("mapping" if self.is_mapping else self.type)
        if self.normalize is not None:
            return f"a list of {text}{', or none' * self.optional}"
        if self.auto and self.type == "true or false":
            return f"true, false or {AUTO}"
        if self.within is not None:
            text += f" from {_written(self.within[0])} to {_written(self.within[1])}"
        elif self.minimum is not None:
            text += f" of at least {_written(self.minimum)}"
        if self.unit:
            text += f" ({self.unit}), or a size such as 80GB"
        if self.auto_and_none:
            return f"{text}, {AUTO}, or {NONE}"
        last = AUTO if self.auto else NONE if self._may_be_none else ""
        return f"{text}, or {last}" if last else text

    @property
    def expected(self) -> str:
        """The allowed values as they follow "expected" in messages."""
        is_plain = self.choices or self.type in ("text", "true or false")
        return self.allowed if is_plain else f"a {self.allowed}"

    @property
    def _may_be_none(self) -> bool:
        """Whether `none` unsets the key. For a key with any text, `none` is a value."""
        return self.optional and (self.type != "text" or self.normalize is not None)

    def text(self, value: Value) -> str:
        """Return `value` as a user types it on the command line."""
        if value is None:
            return AUTO if self.auto else ""
        return str(value).lower() if isinstance(value, bool) else str(value)

    def parse(self, text: str) -> Value:
        """Return the value of a text; UsageError if the value isn't allowed."""
        has_auto = self.auto or self.auto_and_none
        if (has_auto and text == AUTO) or (self._may_be_none and text == NONE):
            return None
        if self.type == "text":
            return self._parse_text(text)
        if self.type == "true or false":
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
            raise self._error(text)
        return self._parse_number(text)

    def _parse_text(self, text: str) -> str:
        if self.normalize is not None:
            return self.normalize(text)
        if self.choices and text not in self.choices:
            raise self._error(text, did_you_mean(text, self.choices))
        if not text:
            noun = "a path" if self.is_path else "text"
            raise UsageError(f"{self.name}=: empty; expected {noun}")
        refuse_credentials(text, self.name)
        return os.path.expanduser(text) if self.is_path else text

    def _parse_number(self, text: str) -> int | float:
        try:
            if self.unit and text[-1:].isalpha():
                number = parse_bytes(text, self.name) / parse_bytes(f"1{self.unit}", self.name)
            else:
                number = float(text)
        except (ValueError, UsageError):
            raise self._error(text) from None
        is_whole = self.type == "whole number"
        if not math.isfinite(number) or (is_whole and number != int(number)):
            raise self._error(text)
        low, high = self.within or (self.minimum, _LARGEST_WHOLE if is_whole else number)
        if number > high or (low is not None and number < low):
            raise self._error(text)
        if not is_whole:
            return number
        try:
            return int(text)  # exact, unlike the float above 2**53
        except ValueError:
            return int(number)

    def _error(self, text: str, hint: str = "") -> UsageError:
        return UsageError(f"{self.name}={text}: expected {self.expected}{hint}")


def _written(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


def key(default: Value, meaning: str, **fields: Any) -> Any:
    """Return a dataclass field for a configuration key; `fields` are other fields of `Key`."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, **fields})


def auto_key(meaning: str, **fields: Any) -> Any:
    """Return a dataclass field whose default is `auto`, stored as None."""
    return key(None, meaning, auto=True, **fields)


def optional_key(meaning: str, **fields: Any) -> Any:
    """Return a dataclass field for a key that isn't set by default."""
    return key(None, meaning, optional=True, **fields)


_TYPES: dict[type, Literal["text", "whole number", "number", "true or false"]] = {
    bool: "true or false", int: "whole number", float: "number", str: "text",
}  # fmt: skip


def keys_of(section: str, schema: type) -> dict[str, Key]:
    """Return the keys of a section by name, from the fields of its dataclass.

    A field whose type is a dataclass is a subsection.
    """
    hints = get_type_hints(schema)
    keys: dict[str, Key] = {}
    for field in dataclasses.fields(schema):
        hint = hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            keys |= keys_of(f"{section}.{field.name}", hint)
        if "meaning" not in field.metadata:
            continue
        base = next(each for each in (get_args(hint) or (hint,)) if each is not type(None))
        name = f"{section}.{field.name}"
        default: Any = field.default
        keys[name] = Key(name, _TYPES[base], default, **field.metadata)
    return keys


def section_from(section: str, schema: type, values: Mapping[str, Value], **more: Value) -> Any:
    """Create the dataclass of a section from values by key, and `more` values by field."""
    hints = get_type_hints(schema)
    content: dict[str, Any] = dict(more)
    for field in dataclasses.fields(schema):
        name, hint = f"{section}.{field.name}", hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            content[field.name] = section_from(name, hint, values)
        elif name in values:
            content[field.name] = values[name]
    return schema(**content)


_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


def parse_bytes(text: str, key: str) -> int:
    """Return the bytes of a size such as 500MB. GB is 10^9 bytes, GiB is 2^30 bytes.

    UsageError, with `key` in its message, if the text isn't a positive number with a known unit.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match.group(2).lower()) if match else None
    number = float(match.group(1)) if match and len(text) < 20 else 0.0
    count = int(number * unit) if unit else 0
    if count <= 0:
        raise UsageError(f"{key} {text}: expected a size above 0, such as 500MB, 5GB or 4GiB")
    return count
