"""The text of a setting that selects layers or parameters: a list of names, or a pattern.

It is a list if it has a comma or space outside of a quantifier such as {1,2}, if brackets or quotes
enclose it, or if it is from a list in a file. Every other text is a regular expression that is
searched in the names.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from fsdpctl.errors import UsageError, nearest

ALL_LINEAR = "all_linear"
_MARKS, _QUOTES = r"[\s,;]+", "'\"`"
_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")
_QUANTIFIER = re.compile(r"\{\d*,?\d*\}")
_ENCLOSED = re.compile(r"[\[({](.*)[\])}]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class NameFilter:
    """A list of names or a pattern, and the setting that it is the value of."""

    key: str
    text: str
    names: tuple[str, ...] | None  # None: the text is a pattern
    ends: bool = False  # a name of the list is the end of a matching name, not any part of it

    @staticmethod
    def of(key: str, text: str, *, ends: bool = False) -> "NameFilter":
        """Read the value of a setting.

        Raises:
            UsageError: If it is neither a list of names nor a regular expression.
        """
        names = _listed(key, text)
        if names is None:
            try:
                re.compile(text)
            except (re.error, OverflowError, RecursionError) as error:
                raise UsageError(f"{key}={text}: not a regular expression: {error}") from None
        return NameFilter(key, text, names, ends)

    def without_all_linear(self) -> tuple["NameFilter | None", bool]:
        """Return the rest, if any, and whether the list has all_linear, in any spelling."""
        names = (self.text,) if self.names is None else self.names
        rest = tuple(each for each in names if each.lower().replace("-", "_") != ALL_LINEAR)
        if rest == names:
            return self, False
        return (replace(self, names=rest) if rest else None), True

    def matches(self, name: str) -> bool:
        return any(self._finds(part, name) for part in self._parts)

    def matches_by(self, word: str, name: str) -> bool:
        """Return whether a name of the list, or what the pattern finds, needs `word` in `name`."""
        masked = name.replace(word, "")
        if self.names is not None:
            return any(self._finds(x, name) and not self._finds(x, masked) for x in self.names)
        found, other = (re.search(self.text, each) for each in (name, masked))
        return found is not None and (other is None or found[0].replace(word, "") != other[0])

    def check(self, names: Collection[str], what: str, known: str, words: Collection[str]) -> None:
        """Check that each name of the list, or the pattern, matches one of `names`.

        UsageError if one does not: it has `what` a name is, the nearest of `words`, and `known`.
        """
        for part in self._parts:
            if not any(self._finds(part, name) for name in names):
                shown = f"{part} " if part != self.text else ""
                hint = nearest(part, words)
                raise UsageError(f"{self.key}={self.text}: {shown}matches no {what}{hint}; {known}")

    @property
    def _parts(self) -> tuple[str, ...]:
        return self.names or (self.text,)

    def _finds(self, part: str, name: str) -> bool:
        if self.names is None:
            return re.search(part, name) is not None
        if self.ends:
            return f".{name}".endswith(f".{part}")
        whole = r"(?<!\d)" * part[0].isdigit() + re.escape(part) + r"(?!\d)" * part[-1].isdigit()
        return re.search(whole, name) is not None  # layers.1 does not match layers.10


def _listed(key: str, text: str) -> tuple[str, ...] | None:
    """Return the names in a list, or None for a pattern."""
    plain = text.strip()
    inner = _ENCLOSED.fullmatch(plain)
    is_bracketed = inner is not None and plain[0] in "[{" and not set("[]{}") & set(inner[1])
    is_quoted = plain[:1] in _QUOTES
    if not (is_bracketed or is_quoted or re.search(_MARKS, _QUANTIFIER.sub("", plain))):
        return None
    within = inner[1] if inner is not None else plain
    names = [each.strip(_QUOTES) for each in re.split(_MARKS, within) if each.strip(_QUOTES)]
    for name in names:
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{key}={text}: {name} in a list: expected names such as q_proj,v_proj, or one "
                "regular expression without a list, such as q_proj|v_proj"
            )
    if not names:
        raise UsageError(f"{key}={text}: empty; expected names such as q_proj,v_proj")
    return tuple(dict.fromkeys(names))
