"""A configuration file of another tool: keys and values as text, before their translation."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpctl.config.recipe import YAML_NULLS, flat_items
from fsdpctl.errors import UsageError

_OFF = ("false", "no", "off", "0", "none", *YAML_NULLS)
_ON = ("true", "yes", "on", "1")


@dataclass(frozen=True, slots=True)
class SourceKey:
    """A key of the file with its value."""

    key: str  # KEY.KEY for nested mappings
    text: str  # the items of a list are separated by commas
    items: tuple[str, ...] = ()  # the items of a list, or the text alone
    is_list: bool = False

    @property
    def is_off(self) -> bool:
        """Whether the value is false, none, 0 or empty."""
        return not self.is_list and self.text.strip().lower() in _OFF

    @property
    def is_on(self) -> bool:
        """Whether the value is true; the name of an option is not."""
        return self.text.strip().lower() in _ON


# Keys of a training file that set the sharding, and keys of accelerate's file that they replace.
_SHARDING = ("fsdp", "fsdp_config", "deepspeed")
_REPLACED_BY_SHARDING = ("distributed_type", "fsdp_config", "deepspeed_config")


class SourceConfig:
    """The keys of a training file and of accelerate's file; each can be taken once."""

    def __init__(self, file: Path, content: object, launch: "SourceConfig | None" = None) -> None:
        """Set both files; UsageError if `content` isn't a mapping of keys to values."""
        if not isinstance(content, Mapping):
            raise UsageError(f"{file}: expected a mapping of keys to values")
        self.file, self.launch = file, launch
        self.content: Mapping[object, object] = _without_nulls(content)
        set_keys = [x for x in _flatten(self.content) if x.text.strip() and not x.is_off]
        used = {each.key.partition(".")[0] for each in set_keys}
        self.sets_sharding = not used.isdisjoint(_SHARDING)
        # Keys that this file decides, whatever `launch` has, as in transformers.
        replaced = _REPLACED_BY_SHARDING if self.sets_sharding else ()
        self.decided = {*used, "gradient_accumulation_steps", *replaced}
        if launch is not None:
            undecided = {key: x for key, x in launch.content.items() if key not in self.decided}
            self.content = {**self.content, **undecided}
        flat = list(_flatten(self.content))
        self._left = {each.key: each for each in flat}
        self._all = {each.key: each for each in self.peek()}
        self.nulls = self._left.keys() - self._all.keys()
        self.no_memory_effect: set[str] = set()  # keys that are read and do not affect memory

    def __contains__(self, key: str) -> bool:
        """Return whether `key`, or a key below it, is not taken yet, even if it isn't set."""
        return any(each == key or each.startswith(f"{key}.") for each in self._left)

    def take(self, *keys: str) -> SourceKey | None:
        """Take all of `keys`, and return the first key that is set."""
        values = [value for key in keys if (value := self._left.pop(key, None)) is not None]
        return next((each for each in values if each.text.strip().lower() not in YAML_NULLS), None)

    def value(self, *keys: str) -> SourceKey | None:
        """Return the first of `keys` that is set, even if it was taken; take all of `keys`."""
        values = [self._all[key] for key in keys if key in self._all]
        self.no_memory_effect |= {each.key for each in values if self._left.pop(each.key, None)}
        return next(iter(values), None)

    def take_on(self, *keys: str) -> SourceKey | None:
        """Take keys, and return the first key that is set if its value is true."""
        value = self.take(*keys)
        return value if value and value.is_on else None

    def take_enabled(self, *keys: str) -> SourceKey | None:
        """Take keys, and return the first key that is set unless its value is off."""
        value = self.take(*keys)
        return value if value and not value.is_off else None

    def text(self, *keys: str, default: str = "") -> str:
        """Take keys, and return the text of the first key that is set."""
        value = self.take(*keys)
        return default if value is None else value.text.strip()

    def whole(self, *keys: str) -> int | None:
        """Take keys and return their whole number, None for `auto`; UsageError for other texts."""
        value = self.take(*keys)
        if value is None or value.text.strip().lower() == "auto":
            return None
        if (number := as_whole(value.text)) is None:
            raise self.error(value, "expected a whole number")
        return number

    def positive(self, *keys: str) -> int | None:
        """Take keys and return their whole number, as `whole` does; UsageError if it is below 1."""
        number = self.whole(*keys)
        if number is not None and number < 1:
            location = f"{self.file_of(keys[0])}: {keys[0]}"
            raise UsageError(f"{location}: expected at least 1, got {number}")
        return number

    def error(self, value: SourceKey, why: str) -> UsageError:
        return UsageError(f"{self.file_of(value.key)}: {value.key}: {value.text[:80]}: {why}")

    def file_of(self, key: str) -> Path:
        """Return the file that has a key. Only the first of keys separated by commas counts."""
        top, launch = re.split(r"[.,]", key)[0], self.launch
        is_own = launch is None or top in self.decided or top not in launch.content
        return self.file if launch is None or is_own else launch.file

    def peek(self) -> tuple[SourceKey, ...]:
        """Return the keys that are set and not taken."""
        return tuple(x for x in self._left.values() if x.text.strip().lower() not in YAML_NULLS)

    def all_keys(self) -> tuple[SourceKey, ...]:
        """Return all keys that are set, even if they were taken."""
        return tuple(self._all.values())

    def rest(self) -> tuple[SourceKey, ...]:
        """Take all remaining keys that are set, and return them."""
        remaining, self._left = self.peek(), {}
        return remaining


def is_zero(text: str) -> bool:
    return not text.strip("0.")


def is_fraction(text: str) -> bool:
    try:
        return 0 < float(text) < 1
    except ValueError:
        return False


def as_whole(text: str) -> int | None:
    """Return the whole number of a text such as 1_000, else None."""
    try:
        number = float(text.strip().replace("_", ""))
        return int(number) if number == int(number) else None
    except (ValueError, OverflowError):
        return None


def _without_nulls(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_nulls(each) for each in node]
    if isinstance(node, Mapping):
        return {key: _without_nulls(each) for key, each in node.items()}
    return None if isinstance(node, str) and node.strip().lower() in YAML_NULLS else node


def _flatten(content: Mapping[object, object]) -> Iterator[SourceKey]:
    for key, value in flat_items(content):
        if isinstance(value, list):
            # For lists of mappings, such as data sets, only their presence matters.
            items = tuple("{}" if isinstance(x, Mapping | list) else _text(x) for x in value)
            yield SourceKey(key, ", ".join(items), items, is_list=True)
        else:
            yield SourceKey(key, _text(value), (_text(value),))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)
