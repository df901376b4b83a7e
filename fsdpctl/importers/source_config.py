"""A configuration of another tool: keys and values as text, until they are translated."""

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

    key: str  # dotted
    text: str  # of a list: its items, separated by commas
    items: tuple[str, ...] = ()  # of a list; else only the text
    is_list: bool = False

    @property
    def is_off(self) -> bool:
        return not self.is_list and self.text.strip().lower() in _OFF

    @property
    def is_on(self) -> bool:
        """Whether the value is true, and not one of several options."""
        return self.text.strip().lower() in _ON


# Keys of a training file that decide how ranks shard, and those of accelerate's that then don't.
_SHARDS = ("fsdp", "fsdp_config", "deepspeed")
_UNUSED_THEN = ("distributed_type", "fsdp_config", "deepspeed_config")


class SourceConfig:
    """The keys of a file, and of accelerate's file with the ranks. Each key can be taken once."""

    def __init__(self, file: Path, content: object, launch: "SourceConfig | None" = None) -> None:
        """Set the file and its content: nested mappings, as in YAML.

        UsageError if the content isn't a mapping.
        """
        if not isinstance(content, Mapping):
            raise UsageError(f"{file}: expected a mapping of keys to values")
        self.file, self.launch = file, launch
        self.content: Mapping[object, object] = _without_nulls(content)
        given = [x for x in _flatten(self.content) if x.text.strip() and not x.is_off]
        used = {each.key.partition(".")[0] for each in given}
        self.shards = not used.isdisjoint(_SHARDS)
        # The keys of `launch` that this file decides, as transformers does.
        of_ranks = _UNUSED_THEN if self.shards else ()
        self.decided = {*used, "gradient_accumulation_steps", *of_ranks}
        if launch is not None:
            others = {key: x for key, x in launch.content.items() if key not in self.decided}
            self.content = {**self.content, **others}
        flat = list(_flatten(self.content))
        self._left = {each.key: each for each in flat}
        self._all = {each.key: each for each in self.peek()}
        self.nulls = self._left.keys() - self._all.keys()
        self.seen: set[str] = set()  # keys that are read, and have no effect on memory

    def __contains__(self, key: str) -> bool:
        """Return whether the file has `key` or a key below it, even if it isn't set."""
        return any(each == key or each.startswith(f"{key}.") for each in self._left)

    def take(self, *keys: str) -> SourceKey | None:
        """Remove all of `keys`, and return the first one that is set."""
        found = [value for key in keys if (value := self._left.pop(key, None)) is not None]
        return next((each for each in found if each.text.strip().lower() not in YAML_NULLS), None)

    def value(self, *keys: str) -> SourceKey | None:
        """Return the first of `keys` that is set, also if it is taken; the others are not left."""
        given = [self._all[key] for key in keys if key in self._all]
        self.seen |= {each.key for each in given if self._left.pop(each.key, None)}
        return next(iter(given), None)

    def take_on(self, *keys: str) -> SourceKey | None:
        """Take keys, and return the first one that is set if its value is true."""
        value = self.take(*keys)
        return value if value is not None and value.is_on else None

    def take_enabled(self, *keys: str) -> SourceKey | None:
        """Take keys, and return the first one that is set unless its value disables it."""
        value = self.take(*keys)
        return value if value is not None and not value.is_off else None

    def text(self, *keys: str, default: str = "") -> str:
        value = self.take(*keys)
        return default if value is None else value.text.strip()

    def whole(self, *keys: str) -> int | None:
        """Take a key and return its whole number, or None if it isn't set or is `auto`.

        UsageError if the value is another text.
        """
        value = self.take(*keys)
        if value is None or value.text.strip().lower() == "auto":
            return None
        if (found := as_whole(value.text)) is None:
            raise self.error(value, "expected a whole number")
        return found

    def positive(self, *keys: str) -> int | None:
        """Take a key and return its whole number, as `whole`.

        UsageError if the number is less than 1.
        """
        found = self.whole(*keys)
        if found is not None and found < 1:
            where = self.file_of(keys[0])
            raise UsageError(f"{where}: {keys[0]}: expected at least 1, got {found}")
        return found

    def error(self, value: SourceKey, why: str) -> UsageError:
        return UsageError(f"{self.file_of(value.key)}: {value.key}: {value.text[:80]}: {why}")

    def file_of(self, key: str) -> Path:
        """Return the file that has a key, or the first of keys separated by commas."""
        top, launch = re.split(r"[.,]", key)[0], self.launch
        is_own = launch is None or top in self.decided or top not in launch.content
        return self.file if launch is None or is_own else launch.file

    def peek(self) -> tuple[SourceKey, ...]:
        """Return the keys that are set and not taken."""
        return tuple(x for x in self._left.values() if x.text.strip().lower() not in YAML_NULLS)

    def all_keys(self) -> tuple[SourceKey, ...]:
        """Return the keys that are set, also those that are taken."""
        return tuple(self._all.values())

    def rest(self) -> Iterator[SourceKey]:
        left, self._left = self.peek(), {}
        yield from left


def as_whole(text: str) -> int | None:
    """Return a whole number, as YAML 1.1 and Python write it, such as 1_000; None if it isn't."""
    try:
        found = float(text.strip().replace("_", ""))
        return int(found) if found == int(found) else None
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
