"""The part of a file's header that lists the spans of tensors that the file stores."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from fsdpctl.checkpoint.tensor_file import CHUNK_BYTES
from fsdpctl.errors import CheckpointError
from fsdpctl.io.documents import parse_json
from fsdpctl.plan.layout import Span

SPANS = "fsdpctl.spans"  # the header's metadata key
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """A span of a flattened tensor, and the checksums of its bytes."""

    span: Span
    digests: bytes  # one per CHUNK_BYTES, concatenated; the last chunk may be shorter

    @property
    def num_chunks(self) -> int:
        """The number of checksums."""
        return len(self.digests) // _DIGEST_BYTES

    def is_chunk(self, number: int, data: memoryview) -> bool:
        """Return whether the checksum of a chunk is that of `data`."""
        start = number * _DIGEST_BYTES
        return xxhash.xxh3_128_digest(data) == self.digests[start : start + _DIGEST_BYTES]


def checksum(data: memoryview | bytes) -> str:
    """Return the 128-bit xxh3 of `data` in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


class Digests:
    """The checksums of every CHUNK_BYTES of a stream that arrives in pieces of any size."""

    def __init__(self) -> None:
        self._done = bytearray()
        self._open = xxhash.xxh3_128()
        self._room = CHUNK_BYTES

    def update(self, data: memoryview) -> None:
        """Add the next bytes."""
        while data:
            piece, data = data[: self._room], data[self._room :]
            self._open.update(piece)
            self._room -= len(piece)
            if not self._room:
                self._close()

    def of_chunks(self) -> bytes:
        """Return the concatenated checksums; no bytes may follow."""
        if self._room < CHUNK_BYTES:
            self._close()
        return bytes(self._done)

    def _close(self) -> None:
        self._done += self._open.digest()
        self._open = xxhash.xxh3_128()
        self._room = CHUNK_BYTES


def digests_of(data: memoryview) -> bytes:
    """Return the concatenated checksums of the chunks of `data`."""
    digests = Digests()
    digests.update(data)
    return digests.of_chunks()


def unknown_digests(num_bytes: int) -> bytes:
    """Return zeros in place of the checksums of `num_bytes` bytes."""
    return bytes(_DIGEST_BYTES * -(-num_bytes // CHUNK_BYTES))


def spans_to_json(stored: Mapping[str, StoredSpan]) -> str:
    """Return the header's text: key -> [start, stop, checksums in hexadecimal]."""
    content = {
        key: [each.span.start, each.span.stop, each.digests.hex()] for key, each in stored.items()
    }
    return json.dumps(content, separators=(",", ":"))


def spans_from_json(text: str, where: str) -> dict[str, StoredSpan]:
    """Parse the text of `spans_to_json`.

    Raises:
        CheckpointError: If the text is invalid; the message begins with `where`.
    """
    stored = parse_json(text, dict[str, tuple[int, int, str]], where, CheckpointError)
    try:
        return {
            key: StoredSpan(Span(start, stop), bytes.fromhex(digests))
            for key, (start, stop, digests) in stored.items()
        }
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None
