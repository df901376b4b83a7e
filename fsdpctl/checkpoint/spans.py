"""The part of a file's header that says which span of which tensor it holds."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from fsdpctl.plan.layout import Span

SPANS = "fsdpctl.spans"  # the header's metadata key


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """Elements of a flattened tensor, and the checksum of their bytes."""

    span: Span
    xxh3: str


def spans_to_json(stored: Mapping[str, StoredSpan]) -> str:
    """As it stands in the header: key -> [start, stop, xxh3]."""
    content = {key: [each.span.start, each.span.stop, each.xxh3] for key, each in stored.items()}
    return json.dumps(content, separators=(",", ":"))


def spans_from_json(text: str) -> dict[str, StoredSpan]:
    """The inverse; ValueError, TypeError or KeyError where it is not of that form."""
    return {
        key: StoredSpan(Span(int(start), int(stop)), str(checksum))
        for key, (start, stop, checksum) in json.loads(text).items()
    }
