"""The text of a setting that selects layers or parameters: a list of names, or a pattern.

A list has commas or is in brackets, as in YAML. Every other text is a regular expression that is
searched in the names.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from fsdpctl.errors import UsageError, nearest

ALL_LINEAR = "all_linear"
_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")
_QUANTIFIER = re.compile(r"\{\d*,?\d*\}")
_IS_LIST = re.compile(r"\[[^][]*\]|.*[\s,;'\"].*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class NameFilter:
    """A list of names or a pattern, and the setting that it is the value of."""

    key: str
    text: str
    patterns: Mapping[str, re.Pattern[str]]  # by the names of the list, or the pattern itself

    @staticmethod
    def of(key: str, text: str, *, ends: bool = False) -> "NameFilter":
        """Read the value of a setting.

        `ends`: a name of a list is the end of a matching name, not any part of it. UsageError if it
        is neither a list of names nor a regular expression.
        """
        if _IS_LIST.fullmatch(_QUANTIFIER.sub("", text.strip())):
            names = _listed(key, text)
            return NameFilter(key, text, {x: re.compile(_pattern_for(x, ends)) for x in names})
        try:
            return NameFilter(key, text, {text: re.compile(text)})
        except (re.error, OverflowError, RecursionError) as error:
            raise UsageError(f"{key}={text}: not a regular expression: {error}") from None

    def without_all_linear(self) -> tuple["NameFilter | None", bool]:
        """Return the rest, if any, and whether the list has all_linear, in any spelling."""
        spelled = {each: each.lower().replace("-", "_") for each in self.patterns}
        rest = {x: each for x, each in self.patterns.items() if spelled[x] != ALL_LINEAR}
        return (replace(self, patterns=rest) if rest else None), len(rest) < len(spelled)

    def matches(self, name: str) -> bool:
        return any(each.search(name) for each in self.patterns.values())

    def matches_by(self, word: str, name: str) -> bool:
        """Return whether what is found in a name needs `word` there."""
        masked = name.replace(word, "")
        found = [(each.search(name), each.search(masked)) for each in self.patterns.values()]
        return any(a and (b is None or a[0].replace(word, "") != b[0]) for a, b in found)

    def check(self, names: Collection[str], what: str, known: str, words: Collection[str]) -> None:
        """Check that each name of the list, or the pattern, matches one of `names`.

        UsageError if one does not: it has `what` a name is, the nearest of `words`, and `known`.
        """
        for part, pattern in self.patterns.items():
            if not any(map(pattern.search, names)):
                shown = f"{part} " if part != self.text else ""
                hint = nearest(part, words)
                raise UsageError(f"{self.key}={self.text}: {shown}matches no {what}{hint}; {known}")


def _listed(key: str, text: str) -> list[str]:
    names = [each.strip(" \t'\"") for each in text.strip().strip("[]").split(",")]
    if names := list(dict.fromkeys(filter(None, names))):
        if (other := next((x for x in names if not _NAME.fullmatch(x)), None)) is None:
            return names
        problem = f"{other} in a list"
    raise UsageError(
        f"{key}={text}: {problem if names else 'empty'}; expected names such as q_proj,v_proj, or "
        "one regular expression such as q_proj|v_proj"
    )


def _pattern_for(name: str, ends: bool) -> str:
    if ends:
        return rf"(?:^|\.){re.escape(name)}$"
    whole = r"(?<!\d)" * name[0].isdigit() + re.escape(name)
    return whole + r"(?!\d)" * name[-1].isdigit()  # layers.1 does not match layers.10
