"""The sources of a mixture, as `data.path` names them: PATH:SHARE,PATH:SHARE."""

import glob
import itertools
import math
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field

from fsdpctl.errors import UsageError


@dataclass(frozen=True, slots=True)
class DataSource:
    """A path of training data, and its share of the tokens."""

    path: str
    share: float | None = None  # a fraction of 1; None: the data isn't mixed by shares
    given_name: str | None = None  # typed before =
    typed_share: float | None = field(default=None, compare=False)  # not normalized

    @property
    def name(self) -> str:
        """The name in metrics: the file name without suffixes and wildcards."""
        stems = [re.split(r"[*?\[.]", part)[0].rstrip("-_") for part in self.path.split("/")]
        return self.given_name or next((stem for stem in stems[::-1] if stem), self.path)

    def text(self, path: str) -> str:
        """Return the text of this source with another path."""
        name = "" if self.given_name is None else f"{self.given_name}="
        return f"{name}{path}" + ("" if self.share is None else f":{self.share!r}")


def sources_in(text: str, key: str = "data.path") -> list[DataSource]:
    """Return the sources in the value of a key: PATH, or NAME=PATH:SHARE separated by commas.

    Names are optional. Shares are normalized to a sum of 1. UsageError if only some sources have a
    share, or if a share isn't above 0.
    """
    if os.path.exists(text):
        return [DataSource(text)]
    inner = text.strip()
    inner = inner[1:-1] if inner.startswith("[") and inner.endswith("]") else inner
    sources = [_source(part.strip(), key) for part in inner.split(",") if part.strip()]
    if not sources:
        raise UsageError(f"{key}={text}: expected at least one file")
    shares = [each.share for each in sources if each.share is not None]
    if shares and len(shares) < len(sources):
        missing = next(each.path for each in sources if each.share is None)
        raise UsageError(f"{key}={text}: {missing} has no share; give one for all files or none")
    if len(sources) == 1 or not shares:
        return [DataSource(each.path, given_name=each.given_name) for each in sources]
    total = sum(shares)
    if math.isclose(total, 1, abs_tol=1e-9):
        total = 1.0  # shares of a stored configuration are normalized; keep their exact values
    return [DataSource(x.path, (x.share or 0) / total, x.given_name, x.share) for x in sources]


def _source(text: str, key: str) -> DataSource:
    """Return the source in a text; `=` and colons belong to the path if such a path exists."""
    name, equals, rest = text.partition("=")
    expanded = os.path.expanduser(text)
    without_share = re.sub(r":[\d.e+-]+$", "", expanded)
    matches = itertools.chain(glob.iglob(expanded), glob.iglob(without_share))
    if not equals or "/" in name or os.path.exists(expanded) or any(matches):
        name, rest = "", text
    path, share = os.path.expanduser(rest), None
    start, colon, last = path.rpartition(":")
    if colon and not os.path.exists(path):
        with suppress(ValueError):
            share = float(last)
            path = start
    if share is not None and not (math.isfinite(share) and share > 0):
        raise UsageError(f"{key}: {text}: expected a share above 0")
    return DataSource(path, share, name or None)


def absolute_paths(text: str, key: str = "data.path") -> str:
    """Return the value of a key of data with absolute paths; URLs stay as they are."""
    sources = sources_in(text, key)
    paths = [each.path if "://" in each.path else os.path.abspath(each.path) for each in sources]
    if len(sources) == 1:
        return paths[0]
    return ",".join(each.text(path) for each, path in zip(sources, paths, strict=True))
