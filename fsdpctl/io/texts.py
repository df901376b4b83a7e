"""Text for terminals: numbers with units, and untrusted names and values; batches of items."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from fsdpctl.errors import UsageError

# C0 without tab and line feed, C1, direction marks, line separators, surrogates.
_CONTROL_CHARACTERS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
# Secrets in URLs. Repeats are bounded: otherwise a search takes quadratic time.
_SECRET_PARAMETER = r"[?&#;][^=\s&]{0,99}(?:token|sig|secret|passw|cred|key|auth)[^=\s&]{0,99}="
_PARAMETER = re.compile(rf"({_SECRET_PARAMETER})[^\s&]+", re.IGNORECASE)
# Also after one slash, because pathlib reduces :// to :/.
_USER = re.compile(r":(//?)(?:[^/\s:]{0,999}:[^\s,]{0,999}|[^/\s]{0,999})@")
_URL_WITH_SECRET = re.compile(
    rf"://(?:[^/\s:]{{0,999}}:[^\s,]{{0,999}}@|[^/\s]{{0,999}}@|\S{{0,999}}(?:{_SECRET_PARAMETER}|[?&#;][\w.%-]{{1,99}}=))",
    re.IGNORECASE,
)
# A directory in the cache of the Hugging Face Hub.
_SNAPSHOT = re.compile(
    r"(?:[^\s:,()=]*/)?(?:models|datasets)--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{7})([0-9a-f]{33})"
)
_GIB, MIB = 1 << 30, 1 << 20
T = TypeVar("T")


def shorten_snapshots(text: str) -> str:
    """Replace directories in the Hub's cache by ORG/NAME@REVISION, with a short revision."""
    return _SNAPSHOT.sub(r"\1/\2@\3", text)


def hub_name(path: str) -> tuple[str, str] | None:
    """Return the name and the commit of a directory in the Hub's cache; None: another path."""
    match = _SNAPSHOT.fullmatch(path)
    return (f"{match[1]}/{match[2]}", match[3] + match[4]) if match else None


def printable(text: str) -> str:
    """Replace control characters, and secrets in URLs."""
    if text.isprintable() and ":/" not in text:
        return text
    text = _CONTROL_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", text)
    return _PARAMETER.sub(r"\1***", _USER.sub(r":\1***@", text))


def one_line(text: str) -> str:
    """Return `printable(text)` in one line, for a name or a value."""
    return printable(text).replace("\n", "\N{REPLACEMENT CHARACTER}")


def escaped(text: str) -> str:
    """Replace unprintable characters, except line feeds, by YAML's string escapes."""
    return "".join(x if x.isprintable() or x == "\n" else f"\\U{ord(x):08x}" for x in text)


def refuse_credentials(text: str, location: str) -> None:
    """Raise a UsageError if a text has a URL with a user, a token or a signature."""
    if _URL_WITH_SECRET.search(text):
        raise UsageError(
            f"{location}: a URL with a user, password, token or signature, which would be "
            "recorded; give credentials to the store's driver, in the environment or its own files"
        )


def format_bytes(count: float) -> str:
    sign, size = "-" * (count < 0), abs(count)
    return f"{sign}{size / _GIB:.2f} GiB" if size >= _GIB else f"{sign}{size / MIB:.1f} MiB"


def three_digits(amount: float) -> str:
    """Format a number with three digits, or with all digits of a larger integer part."""
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:#.3g}"


def batch_by_size(items: Iterable[T], size: Callable[[T], int], min_size: int) -> Iterator[list[T]]:
    """Yield lists of successive items. All but the last have a total size of `min_size` or more."""
    batch, total = list[T](), 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= min_size:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
