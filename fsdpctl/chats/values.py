"""Values of a row: JSON types without nulls, which MessagePack can send to other processes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.msgpack import Ext

from fsdpctl.errors import UsageError, shorten_list
from fsdpctl.io.untrusted import parse_json

Message = dict[str, Any]
_TYPE_NAMES: dict[type, str] = {
    str: "text", list: "a list", dict: "a JSON object", bool: "a Boolean", type(None): "null"
}  # fmt: skip
_MAX_NAMED_KEYS = 12
_INTEGER_CODE = 1  # the extension code for integers above 64 bits, which MessagePack lacks


@dataclass(frozen=True, slots=True)
class RowKeys:
    """The keys of a row that notes report, such as `source` and `messages[].name`."""

    followed: set[str] = field(default_factory=set)  # change what is trained on
    ignored: set[str] = field(default_factory=set)  # not used by fsdpctl


def without_nulls(value: Any, key: str = "row") -> Any:
    """Return a value without null fields at any depth. `key` names the value in messages.

    Parquet and similar tables fill missing fields with null. UsageError if the value has a type or
    a number that JSON doesn't have.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {name: without_nulls(each, name) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each, key) for each in value]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return Ext(_INTEGER_CODE, str(value).encode())
    if value is None or isinstance(value, int | Ext):
        return value
    if not isinstance(value, float):
        raise UsageError(f"{key}: value of type {type(value).__name__}: not supported")
    if not math.isfinite(value):
        raise UsageError(f"{key}: {value} is not a number in JSON")
    return value


def clipped(text: object, max_chars: int = 300) -> str:
    return "".join(each if each.isprintable() else "?" for each in str(text)[:max_chars])


def from_extension(code: int, data: memoryview) -> int:
    """Return the integer of an extension that `without_nulls` made."""
    assert code == _INTEGER_CODE
    return int(bytes(data))


def expect(value: Any, kind: type, location: str) -> Any:
    """Return a value of the type `kind`; UsageError if it has another type."""
    if isinstance(value, kind):
        return value
    got = _TYPE_NAMES.get(type(value), "a number")
    raise UsageError(f"{location}: expected {_TYPE_NAMES[kind]}, got {got}")


def expect_text(fields: Mapping[str, Any], key: str, location: str = "") -> str:
    return str(expect(fields.get(key, ""), str, f"{location}{key}"))


def as_list(value: object, key: str) -> list[Any]:
    """Return a list, decoded from JSON if it is text, as in some tables."""
    if isinstance(value, str):
        value = without_nulls(parse_json(value, list[Any], key), key) if value.strip() else []
    content: list[Any] = expect(value, list, key)
    return content


def as_object(value: object, key: str) -> dict[str, Any]:
    """Return an object, decoded from JSON if it is text."""
    if isinstance(value, str):
        value = without_nulls(parse_json(value, dict[str, Any], key), key)
    content: dict[str, Any] = expect(value, dict, key)
    return content


def list_counts(counts: Mapping[str, int]) -> str:
    """List keys with the number of rows that have them, most frequent first."""
    ranked = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    names = [f"{clipped(key)} ({count_of(count, 'row')})" for key, count in ranked]
    return shorten_list(names, _MAX_NAMED_KEYS)


def count_of(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
