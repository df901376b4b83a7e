"""The metadata of a checkpoint: spans in the headers of files, and the manifest.

The manifest is written last: a checkpoint without it is incomplete.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import xxhash
from msgspec import Meta

from fsdpctl.checkpoint.tensor_file import (
    CHUNK_BYTES,
    ITEMSIZES,
    TensorEntry,
    make_header,
    write_tensor_file,
)
from fsdpctl.checkpoint.training_progress import Progress
from fsdpctl.data.tokenizer_files import TEMPLATES, TOKENIZER_FILES, checked_asset_name
from fsdpctl.errors import CheckpointError
from fsdpctl.io.checksummed_json import checksummed, read_checksummed
from fsdpctl.io.files import checked_name
from fsdpctl.io.run_files import CONFIG_JSON, MANIFEST
from fsdpctl.io.untrusted import MAX_COUNT, Count, as_type, parse_json
from fsdpctl.plan.layout import Span

SPANS_KEY = "fsdpctl.spans"  # the header's metadata key
_DIGEST_BYTES = 16
_RANK_FILE = r"rank-\d{5,}\.safetensors"
INDEX_JSON = "model.safetensors.index.json"
GENERATION_CONFIG = "generation_config.json"
# Files next to weights.
MODEL_CONFIG_FILES = (CONFIG_JSON, GENERATION_CONFIG)
ASSETS = (*MODEL_CONFIG_FILES, *TOKENIZER_FILES, TEMPLATES)
# Kinds of tensors; others are optimizer states. A remainder: the lower 8 bits of 24-bit weights.
PARAMETER, BUFFER, REMAINDER = "model", "buffer", "remainder"


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """A span of a flattened tensor, and the checksums of its bytes."""

    span: Span
    digests: bytes  # one per CHUNK_BYTES, concatenated; the last chunk may be shorter

    @property
    def num_chunks(self) -> int:
        return len(self.digests) // _DIGEST_BYTES

    def matches_chunk(self, index: int, data: memoryview) -> bool:
        start = index * _DIGEST_BYTES
        return xxhash.xxh3_128_digest(data) == self.digests[start : start + _DIGEST_BYTES]


def checksum(data: memoryview | bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def chunk_digests(stream: Iterable[memoryview]) -> bytes:
    """Return the concatenated checksums of each CHUNK_BYTES of a stream of pieces of any size."""
    digests, chunk, room = bytearray(), xxhash.xxh3_128(), CHUNK_BYTES
    for data in stream:
        while data:
            piece, data = data[:room], data[room:]
            chunk.update(piece)
            room -= len(piece)
            if not room:
                digests += chunk.digest()
                chunk, room = xxhash.xxh3_128(), CHUNK_BYTES
    return bytes(digests if room == CHUNK_BYTES else digests + chunk.digest())


def write_span_file(
    path: Path, stored: Mapping[str, tuple[str, StoredSpan]], chunks: Iterable[memoryview]
) -> "FileInfo":
    """Write a new file of spans; return its size and checksum. `stored`: dtype and span by key."""
    entries = [TensorEntry(key, dtype, (x.span.numel,)) for key, (dtype, x) in stored.items()]
    spans = {key: [x.span.start, x.span.stop, x.digests.hex()] for key, (_, x) in stored.items()}
    header = make_header(entries, {SPANS_KEY: json.dumps(spans, separators=(",", ":"))})
    return FileInfo(write_tensor_file(path, header, chunks), checksum(header))


def spans_from_json(text: str, location: str) -> dict[str, StoredSpan]:
    """Parse the text of the spans in a header; messages begin with `location`."""
    stored = parse_json(text, dict[str, tuple[int, int, str]], location, CheckpointError)
    try:
        return {key: StoredSpan(Span(a, b), bytes.fromhex(x)) for key, (a, b, x) in stored.items()}
    except ValueError as error:
        raise CheckpointError(f"{location}: {error}") from None


def tensor_key(kind: str, name: str) -> str:
    """Return the name of a tensor in files: `kind/name`."""
    return f"{kind}/{name}"


def parameter_name(key: str) -> str:
    """Return the name of the parameter with a key; keys of other tensors are unchanged."""
    return key.removeprefix(f"{PARAMETER}/")


@dataclass(frozen=True, slots=True)
class FileInfo:
    """The expected size and checksum of a file."""

    size: Count
    # The checksum of all bytes, or of a tensor file's header, which contains further checksums.
    xxh3: str


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The shape and dtype of a full tensor, of which several files may store spans."""

    shape: Annotated[list[Count], Meta(max_length=64)]
    dtype: str  # safetensors' name

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class BaseInfo:
    """The location of weights that a checkpoint omits because they are not trained."""

    path: str  # a Hugging Face directory or a checkpoint
    xxh3: str  # over all weights in `path`, as stored
    sampled: str  # checksum of 1 MiB of each weight, verified at every start


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a checkpoint except the tensors' bytes."""

    files: dict[str, FileInfo]  # tensor files by name
    attachments: dict[str, FileInfo]  # other files of the model by name, such as its tokenizer
    tensors: dict[str, TensorInfo]  # full tensors by key
    progress: Progress
    config: dict[str, str]  # resolved settings by key
    versions: dict[str, str]
    world_size: Count
    base: BaseInfo | None = None  # where untrained weights are stored; None: in the checkpoint

    def to_json(self) -> str:
        content = asdict(self)
        if self.base is None:
            del content["base"]
        return checksummed(content)


def read_manifest(folder: Path) -> Manifest:
    location = f"{folder / MANIFEST}: corrupted"
    manifest = as_type(read_checksummed(folder), Manifest, location, CheckpointError)
    # The manifest is untrusted: names must stay in the folder, and sizes must be possible.
    for name in manifest.files:
        checked_name(name, _RANK_FILE, location, CheckpointError)
    for name in manifest.attachments:
        checked_asset_name(name, location, CheckpointError)
        if name == MANIFEST:
            raise CheckpointError(f"{location}: attachment {name} not supported")
    for key, info in manifest.tensors.items():
        if info.dtype not in ITEMSIZES or info.numel > MAX_COUNT:
            raise CheckpointError(f"{location}: tensor {key[:80]} not supported")
    return manifest
