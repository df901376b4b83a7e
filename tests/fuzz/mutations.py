"""Random damage to files, determined by a seed: bytes, JSON values, lines."""

import json
import random
from typing import Any

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 7, 64, 1 << 31, 1 << 53, 1 << 63, 10**30, -(10**30), 0.5, 2.0,
    1e308, float("inf"), float("-inf"), float("nan"), "",
    "0", "-1", "1e9", "../../x", "/etc/passwd",
    "~", "${oc.env:HOME}", "x" * 5000, "\0", "\x1b[2J", "é\ud800", [], {}, [[]], [1, 2], {"a": 1},
]  # fmt: skip
_BYTES = [
    b"{", b"}", b"[", b"]", b'"', b",", b":", b"\0", b"\xff", b"\n", b"-", b"9" * 40, b"[" * 9999,
]  # fmt: skip


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return bytes of which some are flipped, cut, doubled or inserted."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        at = rng.randrange(len(data) + 1) if data else 0
        end = min(len(data), at + rng.choice((1, 4, 100, 5000)))
        match rng.randrange(5):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at:end] = b""
            case 2:
                data[at:at] = data[at:end]
            case 3:
                data[at:at] = rng.choice(_BYTES)
            case _:
                data = data[:at]
    return bytes(data)


def damaged_value(content: Any, rng: random.Random) -> Any:
    """Return a JSON value with one inner value replaced, removed, renamed or doubled."""
    content = json.loads(json.dumps(content))
    places = list(_paths(content))
    if not places:
        return rng.choice(ODD)
    holder, key = rng.choice(places)
    match rng.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[str(rng.choice(ODD))[:300]] = holder.pop(key)
        case 2:
            other, name = rng.choice(places)
            if name in other if isinstance(other, dict) else name < len(other):
                holder[key] = json.loads(json.dumps(other[name]))
        case 3 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = holder[key] * rng.choice((-1, 0, 2, 0.5, 10**9, 1e300))
        case 4 if isinstance(holder[key], str):
            holder[key] = damaged_bytes(holder[key].encode(), rng).decode("utf-8", "replace")
        case _:
            holder[key] = rng.choice(ODD)
    return content


def _paths(content: Any) -> Any:
    entries = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in list(entries):
        yield content, key
        if isinstance(value, dict | list):
            yield from _paths(value)


def damaged_json(content: bytes, rng: random.Random) -> bytes:
    """Return JSON with damaged values or, less often, damaged bytes."""
    if rng.random() < 0.3:
        return damaged_bytes(content, rng)
    return json.dumps(damaged_value(json.loads(content), rng)).encode("utf-8", "surrogatepass")
