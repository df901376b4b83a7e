"""Token files: raw little-endian NAME.bin, described by NAME.json, and those of other programs."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from fsdpctl.config.model import MOST_TOKENS
from fsdpctl.data.shards import ShardTokens
from fsdpctl.data.token_formats import OURS, TokenFile
from fsdpctl.data.tokenizer import Tokenizer
from fsdpctl.data.tokens import TokenStream
from fsdpctl.errors import UsageError
from fsdpctl.io.activity import BYTES, doing
from fsdpctl.io.files import replace

_CHUNK = 1 << 22  # tokens


def write_header(
    path: Path, tokenizer: Tokenizer, num_tokens: int, xxh3: str, num_bytes: int | None
) -> None:
    """Write the header of NAME.bin, which exists."""
    header = {
        "format": OURS[0],
        "version": OURS[1],
        "dtype": np.dtype(tokenizer.dtype).name,
        "num_tokens": num_tokens,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.name,
        "tokenizer_xxh3": tokenizer.checksum,
        "num_bytes": num_bytes,
        "xxh3": xxh3,
    }
    replace(path.with_suffix(".json"), json.dumps(header, indent=2) + "\n")


def stream_of(files: Sequence[TokenFile], origin: str, *, isolates: bool = False) -> TokenStream:
    """Return the tokens of files, one file after the other."""
    sizes = [each.num_bytes for each in files]
    known = [each for each in sizes if each is not None]
    return TokenStream(
        ShardTokens([each.shard for each in files]),
        sum(known) if len(known) == len(files) else None,
        files[0].xxh3 if len(files) == 1 and files[0].xxh3 else _fingerprint(files),
        origin,
        isolates,
    )


def _fingerprint(files: Sequence[TokenFile]) -> str:
    """Return a checksum of the files' checksums, or of their sizes and first bytes."""
    digest = xxhash.xxh3_64()
    for file in files:
        shard = file.shard
        digest.update(f"{shard.count} {shard.dtype.str} {file.xxh3 or file.start};".encode())
    return digest.hexdigest()


def check_tokens(file: TokenFile, vocab_size: int | None) -> None:
    """Read and check all tokens; `vocab_size` is that of the model.

    Raises:
        UsageError: If the checksum differs from the header's, or a token isn't in the vocabulary.
    """
    tokens, digest, path = ShardTokens([file.shard]), xxhash.xxh3_64(), file.shard.path
    most = file.vocab_size or vocab_size or MOST_TOKENS
    with doing(f"checking {path}", BYTES, file.size) as advance:
        for start in range(0, len(tokens), _CHUNK):
            part = tokens[start : start + _CHUNK]
            digest.update(part.data)
            for worst in (int(part.argmax()), int(part.argmin())):
                if not 0 <= part[worst] < most:
                    raise UsageError(
                        f"{path}: token {start + worst}: expected less than {most}, the size of "
                        f"the vocabulary, got {part[worst]}{file.hint and f'; {file.hint}'}"
                    )
            advance(part.nbytes)
    if file.xxh3 not in (None, digest.hexdigest()):
        raise UsageError(f"{path}: corrupted: the checksum differs from its header")
