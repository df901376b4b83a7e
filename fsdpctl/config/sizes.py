"""Sizes in bytes as people write them."""

import re

from fsdpctl.errors import UsageError

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


def parse_bytes(text: str, key: str) -> int:
    """The number of bytes that `text` means; GB is 10^9, GiB is 2^30.

    Raises:
        UsageError: it is not a positive number with such a unit.
    """
    match = _FORM.fullmatch(text.strip())
    unit = _UNITS.get(match.group(2).lower()) if match else None
    number = float(match.group(1)) if match and len(text) < 20 else 0.0
    count = int(number * unit) if unit else 0
    if count <= 0:
        raise UsageError(f"{key} {text}: allowed is a size above 0, as in 500MB, 5GB or 4GiB")
    return count
