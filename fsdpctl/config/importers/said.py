"""What a configuration of another tool says: its keys and values, as text, until understood."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fsdpctl.errors import UsageError

_MOST_KEYS = 10_000  # aliases make few lines into many
_MOST_DEEP = 16
_UNSET = ("", "null", "~")
_OFF = ("false", "no", "off", "0", "none", *_UNSET)
_ON = ("true", "yes", "on", "1")


@dataclass(frozen=True, slots=True)
class Value:
    """A key that is set, and what it is set to."""

    key: str  # dotted
    text: str  # of a list: its items with commas between
    items: tuple[str, ...]  # of a list; else the text alone

    @property
    def is_off(self) -> bool:
        """Whether it says no."""
        return self.text.strip().lower() in _OFF

    @property
    def is_on(self) -> bool:
        """Whether it says yes, and nothing more."""
        return self.text.strip().lower() in _ON


class Said:
    """The keys of one file; each can be taken once."""

    def __init__(self, file: Path, content: object) -> None:
        """`content` is nested mappings, as YAML or TOML have them.

        Raises:
            UsageError: it is no mapping, or larger than a configuration is.
        """
        if not isinstance(content, Mapping):
            raise UsageError(f"{file}: is no mapping of keys to values")
        self.file = file
        flat = list(islice(_flatten("", content, file), _MOST_KEYS + 1))
        if len(flat) > _MOST_KEYS:
            raise UsageError(f"{file}: more than {_MOST_KEYS} keys")
        self._left = {each.key: each for each in flat}

    def __contains__(self, key: str) -> bool:
        """Whether `key`, or one below it, is there; set or not."""
        return any(each == key or each.startswith(f"{key}.") for each in self._left)

    def take(self, *keys: str) -> Value | None:
        """The first of `keys` that is set, none of which is there afterwards."""
        found = [value for key in keys if (value := self._left.pop(key, None)) is not None]
        return next((each for each in found if each.text.strip().lower() not in _UNSET), None)

    def text(self, *keys: str, default: str = "") -> str:
        """The same, its text alone."""
        value = self.take(*keys)
        return default if value is None else value.text.strip()

    def whole(self, *keys: str) -> int | None:
        """The same, as a whole number; None where it is not set, or `auto`.

        Raises:
            UsageError: it is none.
        """
        value = self.take(*keys)
        if value is None or value.text.strip().lower() == "auto":
            return None
        try:
            return int(value.text)
        except ValueError:
            raise self.refused(value, "a whole number is expected") from None

    def positive(self, *keys: str) -> int | None:
        """The same; what is below 1 is refused.

        Raises:
            UsageError: it is no such number.
        """
        found = self.whole(*keys)
        if found is not None and found < 1:
            raise UsageError(f"{self.file}: {keys[0]}: {found}: from 1 on")
        return found

    def refused(self, value: Value, why: str) -> UsageError:
        """The error that says why a value cannot be."""
        return UsageError(f"{self.file}: {value.key}: {value.text[:80]}: {why}")

    def peek(self) -> tuple[Value, ...]:
        """What nobody took yet and is set."""
        return tuple(x for x in self._left.values() if x.text.strip().lower() not in _UNSET)

    def rest(self) -> Iterator[Value]:
        """What nobody took and is set, in the file's order; nothing is there afterwards."""
        left, self._left = self.peek(), {}
        yield from left


def _flatten(prefix: str, content: Mapping[object, object], file: Path) -> Iterator[Value]:
    if prefix.count(".") >= _MOST_DEEP:
        raise UsageError(f"{file}: {prefix[:80]} is nested too deeply")
    for word, value in content.items():
        key = f"{prefix}{word}"
        if isinstance(value, Mapping):
            yield from _flatten(f"{key}.", value, file)
        elif isinstance(value, list):
            # Of a list of mappings, as of data sets, only that it is there is of interest.
            items = tuple("{}" if isinstance(x, Mapping | list) else _text(x) for x in value)
            yield Value(key, ", ".join(items), items)
        else:
            yield Value(key, _text(value), (_text(value),))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)
