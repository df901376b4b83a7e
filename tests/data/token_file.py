"""Write a token file at once."""

from pathlib import Path

import numpy as np
import xxhash

from fsdpctl.data.tokenizer import TextPiece, Tokenizer, Tokens
from fsdpctl.data.tokenizing import write_header
from fsdpctl.io.files import open_atomic


def write_token_file(
    path: Path, tokens: Tokens, tokenizer: Tokenizer, *, num_bytes: int | None
) -> None:
    """Write NAME.bin and NAME.json. The header is last, so that a truncated file has none."""
    data = np.ascontiguousarray(tokens, dtype=np.dtype(tokenizer.dtype))
    with open_atomic(path, durable=True) as file:
        file.write(data.data)
    write_header(path, tokenizer, data.size, xxhash.xxh3_64_hexdigest(data.data), num_bytes)


def encoded(tokenizer: Tokenizer, *texts: str) -> Tokens:
    """Return the tokens of documents, one after the other."""
    return tokenizer.encode_pieces([TextPiece(each, len(each.encode())) for each in texts])
