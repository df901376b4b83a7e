"""The part of a file's header that says which span of which tensor it holds."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from fsdpctl.checkpoint.tensor_file import CHUNK_BYTES
from fsdpctl.plan.layout import Span

SPANS = "fsdpctl.spans"  # the header's metadata key


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """Elements of a flattened tensor, and the checksums of their bytes."""

    span: Span
    checksums: tuple[str, ...]  # of each CHUNK_BYTES, the last chunk being shorter


def checksum(data: memoryview | bytes) -> str:
    """xxh3 of 128 bits, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def checksums_of(data: memoryview) -> tuple[str, ...]:
    """The checksum of each chunk of `data`."""
    return tuple(
        checksum(data[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES)
    )


def spans_to_json(stored: Mapping[str, StoredSpan]) -> str:
    """As it stands in the header: key -> [start, stop, checksum of each chunk]."""
    content = {
        key: [each.span.start, each.span.stop, *each.checksums] for key, each in stored.items()
    }
    return json.dumps(content, separators=(",", ":"))


def spans_from_json(text: str) -> dict[str, StoredSpan]:
    """The inverse; ValueError, TypeError or KeyError where it is not of that form."""
    return {
        key: StoredSpan(Span(int(start), int(stop)), tuple(map(str, checksums)))
        for key, (start, stop, *checksums) in json.loads(text).items()
    }
