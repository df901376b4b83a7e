"""Text to token ids and back: bytes themselves, or a tokenizer.json."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as JsonTokenizer
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from fsdpctl.data.files import Text, iter_documents
from fsdpctl.errors import UsageError

BYTES = "bytes"
_COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
Tokens = NDArray[np.unsignedinteger]


class Tokenizer(Protocol):
    """What the trainer needs of a tokenizer."""

    name: str
    vocab_size: int

    def encode(self, text: Text) -> Tokens:
        """All documents, one after another."""
        ...

    def encode_prompt(self, prompt: str) -> list[int]:
        """The tokens of a prompt; at least one."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens."""
        ...

    def save(self, folder: Path) -> None:
        """Write the files with which transformers opens it."""
        ...


class ByteTokenizer:
    """A token is a byte of UTF-8."""

    name = BYTES
    vocab_size = 256

    def encode(self, text: Text) -> Tokens:
        """The bytes of all documents."""
        return np.frombuffer(b"".join(text.documents), dtype=np.uint8)

    def encode_prompt(self, prompt: str) -> list[int]:
        """The bytes of the prompt; of an empty one, a line's end."""
        return list(prompt.encode() or b"\n")

    def decode(self, tokens: Sequence[int]) -> str:
        """The text; what is no UTF-8 becomes a replacement character."""
        known = bytes(token if token < self.vocab_size else 0xFF for token in tokens)
        return known.decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """A byte-level BPE without merges: its 256 tokens are the bytes, in order."""
        alphabet = _byte_alphabet()
        tokenizer = JsonTokenizer(BPE(vocab={alphabet[b]: b for b in range(256)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(folder / "tokenizer.json"))
        about = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1 << 30,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")


def _byte_alphabet() -> list[str]:
    """The character that byte-level tokenizers write for each byte (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, spare = [], 0x100
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(spare))
            spare += 1
    return letters


class FileTokenizer:
    """A Hugging Face tokenizer.json; documents end with its end-of-text token, if it has one."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise UsageError(f"tokenizer {folder}: there is no tokenizer.json; or use bytes")
        try:
            self._tokenizer = JsonTokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise UsageError(f"tokenizer {folder}: {error}") from None
        self.name = str(folder)
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=0)
        self._folder = folder
        self._end = self._find_end_token()

    def _find_end_token(self) -> int | None:
        file = self._folder / "tokenizer_config.json"
        if not file.is_file():
            return None
        try:
            named = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
        except (ValueError, AttributeError):
            raise UsageError(f"{file}: not a JSON object") from None
        text = named.get("content") if isinstance(named, dict) else named
        if text is not None and not isinstance(text, str):
            raise UsageError(f"{file}: eos_token is no text")
        found: int | None = self._tokenizer.token_to_id(text) if text else None
        return found

    def encode(self, text: Text) -> Tokens:
        """The tokens of all documents."""
        dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        end = [] if self._end is None else [self._end]
        encoded = self._tokenizer.encode_batch_fast(
            list(iter_documents(text)), add_special_tokens=False
        )
        parts = [np.array([*each.ids, *end], dtype=dtype) for each in encoded]
        return np.concatenate(parts)

    def encode_prompt(self, prompt: str) -> list[int]:
        """The tokens of the prompt; of an empty one, the end of a document before."""
        tokens: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        return tokens or [self._end or 0]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, special tokens left out."""
        text: str = self._tokenizer.decode(list(tokens))
        return text

    def save(self, folder: Path) -> None:
        """Copy the files that make the tokenizer."""
        for name in _COPIED:
            if (self._folder / name).is_file():
                shutil.copyfile(self._folder / name, folder / name)


def open_tokenizer(name: str | None) -> Tokenizer:
    """The tokenizer called `bytes` (also None), or the one in a directory.

    Raises:
        UsageError: the directory has no readable tokenizer.json.
    """
    return ByteTokenizer() if name in (None, BYTES) else FileTokenizer(Path(str(name)))
