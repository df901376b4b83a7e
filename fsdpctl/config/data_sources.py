"""The sources of a mixture, as `data.path` names them: PATH:SHARE,PATH:SHARE."""

import glob
import math
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field

from fsdpctl.errors import UsageError


@dataclass(frozen=True, slots=True)
class DataSource:
    """A path, and its part of the data."""

    path: str
    share: float | None = None  # of one; None: all of it
    given_name: str | None = None
    weight: float | None = field(default=None, compare=False)  # the share as given

    @property
    def name(self) -> str:
        """Its name in metrics: of a file without suffixes, of a glob without its stars."""
        words = [re.split(r"[*?\[]", each)[0] for each in self.path.split("/")]
        found = [word.partition(".")[0].rstrip("-_") for word in words]
        return self.given_name or next((each for each in found[::-1] if each), self.path)

    def text(self, path: str) -> str:
        name = "" if self.given_name is None else f"{self.given_name}="
        return f"{name}{path}" + ("" if self.share is None else f":{self.share!r}")


def sources_in(text: str, key: str = "data.path") -> list[DataSource]:
    """Return what a key names: PATH, or NAME=PATH:SHARE for each, separated by commas.

    Names are optional. Shares are normalized to a sum of one. UsageError if only some have a share,
    or if a number is not allowed.
    """
    if os.path.exists(text):
        return [DataSource(text)]
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1]
    found = [_source(word.strip(), key) for word in inner.split(",") if word.strip()]
    if not found:
        raise UsageError(f"{key}={text}: expected at least one file")
    shares = [each.share for each in found if each.share is not None]
    if shares and len(shares) < len(found):
        missing = next(each.path for each in found if each.share is None)
        problem = f"{missing} has no share; give a share for all files or none"
        raise UsageError(f"{key}={text}: {problem}")
    if len(found) == 1 or not shares:
        return [DataSource(each.path, given_name=each.given_name) for each in found]
    total = sum(shares)
    if math.isclose(total, 1, abs_tol=1e-9):
        total = 1.0  # so that shares that were normalized stay as they are
    return [
        DataSource(each.path, (each.share or 0) / total, each.given_name, each.share)
        for each in found
    ]


def _source(word: str, key: str) -> DataSource:
    """Return the source of a word; of a path that exists, `=` and colons are part of it."""
    name, equals, rest = word.partition("=")
    whole = os.path.expanduser(word)
    places = glob.iglob(whole), glob.iglob(re.sub(r":[\d.e+-]+$", "", whole))
    if not equals or "/" in name or os.path.exists(whole) or any(map(any, places)):
        name, rest = "", word
    path, share = os.path.expanduser(rest), None
    start, colon, last = path.rpartition(":")
    if colon and not os.path.exists(path):
        with suppress(ValueError):
            share = float(last)
            path = start
    if share is not None and not (math.isfinite(share) and share > 0):
        raise UsageError(f"{key}: {word}: expected a share above 0")
    return DataSource(path, share, name or None)


def absolute_paths(text: str, key: str = "data.path") -> str:
    found = sources_in(text, key)
    paths = [each.path if "://" in each.path else os.path.abspath(each.path) for each in found]
    if len(found) == 1:
        return paths[0]
    return ",".join(each.text(path) for each, path in zip(found, paths, strict=True))
