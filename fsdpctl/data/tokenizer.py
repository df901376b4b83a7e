"""Tokenizers: bytes, or a tokenizer.json of Hugging Face."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from tokenizers import Tokenizer as JsonTokenizer
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from fsdpctl.config.model import MOST_TOKENS
from fsdpctl.data.files import Text, iter_documents
from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.io.documents import MIB, parse_json
from fsdpctl.io.files import read_regular

BYTES = "bytes"
TOKENIZER_JSON, _CONFIG = "tokenizer.json", "tokenizer_config.json"
TOKENIZER_FILES = (
    TOKENIZER_JSON, _CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
MOST_ASSET_BYTES = 256 * MIB  # per file; the largest known tokenizer.json has 35
Tokens = NDArray[np.unsignedinteger]


class ByteTokenizer:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    name = BYTES
    vocab_size = 256

    def encode(self, text: Text) -> Tokens:
        """Return the bytes of all documents."""
        return np.frombuffer(b"".join(text.documents), dtype=np.uint8)

    def encode_prompt(self, prompt: str) -> list[int]:
        """Return the bytes of the prompt, or a line break if it is empty."""
        return list(prompt.encode() or b"\n")

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text, with replacement characters for bytes that aren't UTF-8."""
        known = bytes(token if token < self.vocab_size else 0xFF for token in tokens)
        return known.decode("utf-8", errors="replace")

    def files(self) -> dict[str, bytes]:
        """Return a byte-level BPE without merges, whose 256 tokens are the bytes in order."""
        alphabet = _byte_alphabet()
        tokenizer = JsonTokenizer(BPE(vocab={alphabet[b]: b for b in range(256)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        about = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1 << 30,
        }
        return {
            TOKENIZER_JSON: tokenizer.to_str(pretty=True).encode(),
            _CONFIG: (json.dumps(about, indent=2) + "\n").encode(),
        }


def _byte_alphabet() -> list[str]:
    """Return the character of each byte in byte-level tokenizers (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a text and the span of characters of each: 1-D, of one length."""

    tokens: Tokens
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]  # exclusive


class FileTokenizer:
    """A Hugging Face tokenizer.json. Documents end with its end-of-text token, if it has one."""

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        """Set the contents of the tokenizer's files, and `name`, their location."""
        self.name = name
        self._files = dict(files)
        self._tokenizer = _json_tokenizer(files[TOKENIZER_JSON], f"tokenizer {name}")
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=0)
        if self.vocab_size > MOST_TOKENS:
            raise UsageError(
                f"tokenizer {name}: token {self.vocab_size - 1}: exceeds the limit of "
                f"{MOST_TOKENS:,} tokens"
            )
        self._end = self._find_end_token()
        added = self._tokenizer.get_added_tokens_decoder()
        self.controls = {each.content: token for token, each in added.items() if each.special}
        if self._end is not None:
            self.controls[str(self._tokenizer.id_to_token(self._end))] = self._end

    @property
    def end(self) -> int | None:
        """The end-of-text token, if there is one."""
        return self._end

    def _find_end_token(self) -> int | None:
        if _CONFIG not in self._files:
            return None
        where = f"tokenizer {self.name}: {_CONFIG}"
        named = parse_json(self._files[_CONFIG], dict[str, Any], where).get("eos_token")
        text = named.get("content") if isinstance(named, dict) else named
        if text is not None and not isinstance(text, str):
            raise UsageError(f"tokenizer {self.name}: eos_token in {_CONFIG}: expected text")
        found: int | None = self._tokenizer.token_to_id(text) if text else None
        return found

    def encode(self, text: Text) -> Tokens:
        """Tokenize all documents, concatenated."""
        dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        end = [] if self._end is None else [self._end]
        with _guarded(f"tokenizer {self.name}"):
            encoded = self._tokenizer.encode_batch_fast(
                list(iter_documents(text)), add_special_tokens=False
            )
        parts = [np.array([*each.ids, *end], dtype=dtype) for each in encoded]
        return np.concatenate(parts)

    def encode_texts(self, texts: Sequence[str]) -> list[Encoded]:
        """Tokenize each text as it is; control tokens in it become control tokens."""
        dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        with _guarded(f"tokenizer {self.name}"):
            found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        encoded = []
        for each in found:
            offsets = np.array(each.offsets, dtype=np.int64).reshape(-1, 2)
            encoded.append(Encoded(np.array(each.ids, dtype=dtype), offsets[:, 0], offsets[:, 1]))
        return encoded

    def beginning(self) -> list[int]:
        """Return the tokens that the tokenizer adds before each text: usually none or one."""
        with _guarded(f"tokenizer {self.name}"):
            found = self._tokenizer.encode("-", add_special_tokens=True)
        added = list(
            takewhile(lambda pair: pair[1], zip(found.ids, found.special_tokens_mask, strict=True))
        )
        return [int(token) for token, _ in added]

    def decode_all(self, tokens: Sequence[int]) -> str:
        """Return the text, including control tokens."""
        with _guarded(f"tokenizer {self.name}"):
            text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def encode_prompt(self, prompt: str) -> list[int]:
        """Tokenize the prompt; an empty one becomes the end of a previous document."""
        with _guarded(f"tokenizer {self.name}"):
            tokens: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        return tokens or [self._end or 0]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text, without special tokens."""
        with _guarded(f"tokenizer {self.name}"):
            text: str = self._tokenizer.decode(list(tokens))
        return text

    def files(self) -> dict[str, bytes]:
        """Return the unchanged files."""
        return dict(self._files)


def _json_tokenizer(content: bytes, where: str) -> JsonTokenizer:
    """Parse a tokenizer.json and disable its truncation and padding.

    Note: the file often stores the truncation and padding of one earlier use, which would silently
    truncate and pad the text. transformers sets its own as well.
    """
    parse_json(content, dict[str, Any], f"{where}: {TOKENIZER_JSON}")
    with _guarded(where):
        tokenizer = JsonTokenizer.from_str(content.decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


@contextmanager
def _guarded(where: str) -> Iterator[None]:
    """Convert exceptions and panics of the library to UsageError.

    Panics aren't Exceptions, and the library prints them first: standard error is redirected.
    """
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    except (KeyboardInterrupt, SystemExit, FsdpctlError, MemoryError):
        raise
    except BaseException as error:
        raise UsageError(f"{where}: {' '.join(str(error).split()):.200}") from None
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


Tokenizer = ByteTokenizer | FileTokenizer


def open_tokenizer(name: str | None) -> Tokenizer:
    """Open the byte tokenizer (`bytes` or None), or the one in a directory.

    Raises:
        UsageError: If the directory has no valid tokenizer.json.
    """
    if name in (None, BYTES):
        return ByteTokenizer()
    folder = Path(str(name))
    if not (folder / TOKENIZER_JSON).is_file():
        raise UsageError(f"tokenizer {folder}: {TOKENIZER_JSON} not found; or use bytes")
    return FileTokenizer(str(folder), read_files(folder, TOKENIZER_FILES))


def tokenizer_checksum(tokenizer: Tokenizer) -> str:
    """Return the xxh3 checksum of the tokenizer.json."""
    return xxhash.xxh3_128_hexdigest(tokenizer.files()[TOKENIZER_JSON])


def read_files(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Read those of the files that exist, by name.

    Raises:
        UsageError: If a file is too large, not regular, or links out of the directory.
    """
    files = (folder / name for name in names)
    return {file.name: read_regular(file, MOST_ASSET_BYTES) for file in files if file.exists()}
