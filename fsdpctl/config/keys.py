"""One configuration key: its type, what is allowed, what it means, and text made into its value."""

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, get_args, get_type_hints

from fsdpctl.config.sizes import parse_bytes
from fsdpctl.errors import UsageError, nearest

AUTO, NONE = "auto", "none"
CHOSEN = 0  # stands for `auto` where that is chosen, and what is not set means something else
_LARGEST_WHOLE = 2**53  # up to here a float, and so 1e3, says exactly which number is meant
Value = str | int | float | bool | None  # None stands for `auto` or, where optional, for not set


@dataclass(frozen=True, slots=True)
class Key:
    """What can be said about one key."""

    name: str  # dotted
    type: Literal["text", "whole number", "number", "true or false"]
    default: Value
    meaning: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    auto: bool = False  # `auto` is allowed, and stored as None
    is_chosen: bool = False  # `auto` is allowed, and stored as CHOSEN, below the minimum
    optional: bool = False  # may be left unset
    is_path: bool = False
    is_executed: bool = False  # a command: taken from who types it, not from files
    is_later: bool = False  # left out of words at its default: runs from before keep their names
    unit: str = ""  # of a number that may also be typed as a size, such as 80GB

    @property
    def allowed(self) -> str:
        """The allowed values in words."""
        words = ", ".join(self.choices) or self.type
        if self.minimum is not None and self.maximum is not None:
            words += f" from {_written(self.minimum)} to {_written(self.maximum)}"
        elif self.minimum is not None:
            words += f" from {_written(self.minimum)}"
        if self.unit:
            words += f" ({self.unit}), or a size such as 80GB"
        if self.auto:
            return f"{words}, or auto"
        if self.is_chosen:
            return f"{words}, {AUTO}, or {NONE}"
        return f"{words}, or {NONE}" if self._may_be_none else words

    @property
    def _may_be_none(self) -> bool:
        """Whether a word unsets it; of text, that word may mean itself."""
        return self.optional and self.type != "text"

    def text(self, value: Value) -> str:
        """How `value` is typed."""
        if value is None:
            return AUTO if self.auto else ""
        if self.is_chosen and value == CHOSEN:
            return AUTO
        return str(value).lower() if isinstance(value, bool) else str(value)

    def parse(self, text: str) -> Value:
        """The value that `text` means.

        Raises:
            UsageError: it is not an allowed value.
        """
        if (self.auto and text == AUTO) or (self._may_be_none and text == NONE):
            return None
        if self.is_chosen and text == AUTO:
            return CHOSEN
        if self.type == "text":
            return self._parse_text(text)
        if self.type == "true or false":
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
            raise self._refused(text)
        return self._parse_number(text)

    def _parse_text(self, text: str) -> str:
        if self.choices and text not in self.choices:
            raise self._refused(text, nearest(text, self.choices))
        if not text:
            raise self._refused(text)
        return os.path.expanduser(text) if self.is_path else text

    def _parse_number(self, text: str) -> int | float:
        try:
            number = self._size(text) if self.unit and text[-1:].isalpha() else float(text)
        except ValueError:
            raise self._refused(text) from None
        whole = self.type == "whole number"
        if not math.isfinite(number) or (whole and number != int(number)):
            raise self._refused(text)
        if self.minimum is not None and number < self.minimum:
            raise self._refused(text)
        if number > (self.maximum or (_LARGEST_WHOLE if whole else number)):
            raise self._refused(text)
        if not whole:
            return number
        try:
            return int(text)  # floats lose digits above 2**53
        except ValueError:
            return int(number)

    def _size(self, text: str) -> float:
        try:
            return parse_bytes(text, self.name) / parse_bytes(f"1{self.unit}", self.name)
        except UsageError:
            raise ValueError(text) from None

    def _refused(self, text: str, hint: str = "") -> UsageError:
        return UsageError(f"{self.name}={text}: allowed is {self.allowed}{hint}")


def _written(number: float) -> str:
    """In digits where it is whole."""
    return str(int(number)) if number == int(number) else f"{number:g}"


def key(default: Value, meaning: str, **about: Any) -> Any:
    """A dataclass field that is a configuration key; `about` are fields of `Key`."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, **about})


_TYPES: dict[type, Literal["text", "whole number", "number", "true or false"]] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
}


def keys_of(section: str, schema: type) -> dict[str, Key]:
    """The keys of a section, by dotted name, from the fields of its dataclass.

    A field that is a dataclass itself is a section within the section.
    """
    hints = get_type_hints(schema)
    found: dict[str, Key] = {}
    for field in dataclasses.fields(schema):
        hint = hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            found |= keys_of(f"{section}.{field.name}", hint)
        if "meaning" not in field.metadata:
            continue
        base = next(each for each in (get_args(hint) or (hint,)) if each is not type(None))
        name = f"{section}.{field.name}"
        default: Any = field.default
        found[name] = Key(name, _TYPES[base], default, **field.metadata)
    return found


def section_from(section: str, schema: type, values: Mapping[str, Value], **more: Value) -> Any:
    """The dataclass of a section, with `values` by dotted name and `more` by field."""
    hints = get_type_hints(schema)
    content: dict[str, Any] = dict(more)
    for field in dataclasses.fields(schema):
        name, hint = f"{section}.{field.name}", hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            content[field.name] = section_from(name, hint, values)
        elif name in values:
            content[field.name] = values[name]
    return schema(**content)


def value_in(part: object, name: str) -> Any:
    """The value of the key `name` in the section `part` that it begins with."""
    return attrgetter(name.split(".", 1)[1])(part)
