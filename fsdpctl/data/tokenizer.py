"""Tokenizers: the byte tokenizer, or a directory that transformers' AutoTokenizer loads."""

import codecs
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray
from tokenizers import Encoding, decoders, pre_tokenizers
from tokenizers import Tokenizer as JsonTokenizer
from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE

from fsdpctl.config.model import MAX_TOKENS
from fsdpctl.data.tokenizer_files import (
    TEMPLATES,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    TOKENIZER_JSON,
    has_tokenizer,
    library_errors,
    load_tokenizer,
    read_files,
)
from fsdpctl.errors import UsageError
from fsdpctl.io.run_files import CONFIG_JSON

BYTE_TOKENIZER = "bytes"
CONTEXT_CHARS = 1 << 15  # text around a piece that is tokenized with the piece
BATCH_BYTES = 4 << 20  # text that is tokenized together
Tokens = NDArray[np.unsignedinteger]


class TextPiece(NamedTuple):
    """A document, or a part of a long document, and its size in bytes."""

    text: str  # a part has up to CONTEXT_CHARS characters of context on both sides
    size: int  # bytes of the text without context, for progress
    begins: bool = True  # whether the document begins here
    ends: bool = True
    span: tuple[int, int] | None = None  # the part in `text`, without context; None: all of it


class ByteTokenizer:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    name = checksum = BYTE_TOKENIZER  # the tokens of bytes never change
    vocab_size = 256
    dtype = np.uint16  # in token files
    splits_text = True

    def encode_pieces(self, pieces: Sequence[TextPiece]) -> Tokens:
        texts = (x.text if x.span is None else x.text[slice(*x.span)] for x in pieces)
        return np.frombuffer("".join(texts).encode(), dtype=np.uint8)

    def encode_prompt(self, prompt: str) -> list[int]:
        """Return the bytes of the prompt, or a line break if the prompt is empty."""
        return list(prompt.encode() or b"\n")

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text, with replacement characters for bytes that aren't UTF-8."""
        content = bytes(token if token < self.vocab_size else 0xFF for token in tokens)
        return content.decode("utf-8", errors="replace")

    def decode_stream(self, tokens: Iterable[int], before: Sequence[int] = ()) -> Iterator[str]:
        """Yield the text of generated tokens as soon as their characters are complete."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            yield decoder.decode(bytes([token if token < self.vocab_size else 0xFF]))
        yield decoder.decode(b"", final=True)

    def files(self) -> dict[str, bytes]:
        """Return a byte-level BPE without merges, whose 256 tokens are the bytes in order."""
        alphabet = _byte_alphabet()
        tokenizer = JsonTokenizer(BPE(vocab={alphabet[b]: b for b in range(256)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
            "model_max_length": 1 << 30,
        }  # fmt: skip
        return {
            TOKENIZER_JSON: tokenizer.to_str(pretty=True).encode(),
            TOKENIZER_CONFIG: (json.dumps(settings, indent=2) + "\n").encode(),
        }


def _byte_alphabet() -> list[str]:
    """Return the character of each byte in byte-level tokenizers (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


@dataclass(frozen=True, slots=True)
class EncodedText:
    """The tokens of a text and the span of characters of each token, as 1-D arrays."""

    tokens: Tokens
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]  # exclusive


class FileTokenizer:
    """A Hugging Face tokenizer, loaded by transformers. Documents end with its EOS token."""

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        """Load the tokenizer of the directory `name` from the contents of its `files`.

        UsageError if transformers can't load the tokenizer, or if its vocabulary is too large.
        """
        self.name = name
        self._location = f"tokenizer {name}"
        self._files = {
            each: content
            for each, content in files.items()
            if each in TOKENIZER_FILES or each.startswith(f"{TEMPLATES}/")
        }
        self.model_config = files.get(CONFIG_JSON)
        self.hf = load_tokenizer(name, files)
        with library_errors(self._location):
            self._backend = _backend(self.hf)
            self.vocab_size = 1 + max(self.hf.get_vocab().values(), default=0)
            self.eos_id: int | None = self.hf.eos_token_id
            added = self.hf.added_tokens_decoder
            specials = (pair for pair in added.items() if pair[1].special)
            self.control_tokens = {each.content: token for token, each in specials}
            if self.eos_id is not None:
                self.control_tokens[str(self.hf.eos_token)] = self.eos_id
            self._control_ids = set(self.control_tokens.values())
            self.prefix, self.suffix = self._find_boundary_tokens()
        # Whether a long text can be tokenized in parts, which requires the spans of tokens.
        self.splits_text = self._backend is not None
        fits_16_bits = self.vocab_size <= 1 << 16
        self.dtype: type[np.unsignedinteger] = np.uint16 if fits_16_bits else np.uint32
        self.first_new_id: int | None = None  # the first token that `data.new_tokens` has added
        if self.vocab_size > MAX_TOKENS:
            problem = f"token {self.vocab_size - 1}: exceeds the limit of {MAX_TOKENS:,} tokens"
            raise UsageError(f"{self._location}: {problem}")

    def _find_boundary_tokens(self) -> tuple[list[int], list[int]]:
        plain, with_added = (next(self._ids(["-"], adds=adds)) for adds in (False, True))
        size = len(plain)
        for start in range(len(with_added) - size + 1):
            if with_added[start : start + size] == plain:
                return with_added[:start], with_added[start + size :]
        return with_added, []

    @cached_property
    def checksum(self) -> str:
        """A checksum of everything that decides the tokens of a text."""
        if self._backend is None:
            parts = [type(self.hf).__name__, *sorted(map(str, self._files.items()))]
        else:
            parts = [self._backend.to_str(), str(self._backend.encode_special_tokens)]
        text = "\0".join([*parts, str(self.eos_id)])
        return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))

    def encode_pieces(self, pieces: Sequence[TextPiece]) -> Tokens:
        """Tokenize and concatenate pieces, with the boundary tokens of each document.

        UsageError if the tokens of a part depend on text that is outside its context.
        """
        with library_errors(self._location):
            rows, arrays = self._ids([each.text for each in pieces if each.span is None]), []
            for piece in pieces:
                row = next(rows) if piece.span is None else self._ids_of_part(piece)
                prefix, suffix = self.boundary_tokens(row, begins=piece.begins)
                tokens = [*prefix, *row, *(suffix if piece.ends else ())]
                arrays.append(np.array(tokens, dtype=self.dtype))
            return np.concatenate(arrays)

    def boundary_tokens(
        self, tokens: Sequence[int] | Tokens, *, begins: bool = True
    ) -> tuple[list[int], list[int]]:
        """Return the tokens to add before and after the `tokens` of a document.

        Boundary tokens that the text itself contains are not added again. `begins`: whether
        `tokens` are the beginning of the document.
        """
        prefix, suffix = self.prefix if begins else [], self.suffix
        if prefix and len(tokens) and tokens[0] == prefix[0] and prefix[0] in self._control_ids:
            prefix = []
        if suffix and [*tokens[-1:]] == suffix[-1:] and suffix[-1] in self._control_ids:
            suffix = []
        has_eos = self.eos_id is None or self.eos_id in self.suffix
        last_token = [*prefix, *tokens[-1:], *suffix][-1:]
        if has_eos or last_token == [self.eos_id]:
            return prefix, suffix
        return prefix, [*suffix, int(self.eos_id or 0)]

    def _ids_of_part(self, piece: TextPiece) -> list[int]:
        """Return the tokens that a part has within the whole text.

        The text around a cut is tokenized alone, which selects a token near the cut. Both parts,
        tokenized with their context, are divided at this token. The tokens around it must agree.
        """
        assert piece.span is not None
        assert self._backend is not None
        encoding = self._backend.encode(piece.text, add_special_tokens=False)
        start, stop = piece.span
        ids: list[int] = encoding.ids
        first = 0 if piece.begins else self._token_at(encoding, ids, piece.text, start)
        last = len(ids) if piece.ends else self._token_at(encoding, ids, piece.text, stop)
        return ids[first:last]

    def _token_at(self, encoding: Encoding, ids: list[int], text: str, cut: int) -> int:
        assert self._backend is not None
        context_text = text[cut - CONTEXT_CHARS : cut + CONTEXT_CHARS]
        context = self._backend.encode(context_text, add_special_tokens=False)
        spans = np.array(context.offsets, dtype=np.int64).reshape(-1, 2)
        starts, stops = spans.T + cut - CONTEXT_CHARS
        # Tokens that are not empty, and that begin after the token before them ends.
        candidates = np.flatnonzero((starts[1:] >= stops[:-1]) & (stops[1:] > starts[1:])) + 1
        if len(candidates):
            context_index = int(candidates[np.abs(starts[candidates] - cut).argmin()])
            half = CONTEXT_CHARS // 2
            first, last = np.searchsorted(starts, (cut - half, cut + half))
            index = encoding.char_to_token(int(starts[context_index]))
            shift = len(ids) if index is None else index - context_index
            indices = range(max(0, first + shift), min(len(ids), last + shift))
            expected = [(context.ids[n], (starts[n], stops[n])) for n in range(first, last)]
            # In repetitions of a character, ids agree at every shift, but their spans don't.
            is_same = [(ids[n], encoding.token_to_chars(n)) for n in indices] == expected
            if index is not None and first <= context_index < last and is_same:
                return index
        raise UsageError(
            f"{self._location}: the tokens of a long text depend on text that is far away; split "
            "the file into shorter ones"
        )

    def encode_texts(self, texts: Sequence[str]) -> list[EncodedText]:
        """Tokenize each text without boundary tokens; control tokens in it are encoded as such.

        UsageError if the tokenizer doesn't return the span of each token.
        """
        if not self.hf.is_fast:
            raise UsageError(
                f"{self._location}: {type(self.hf).__name__} returns no positions of tokens, which "
                "data=chat requires; expected a tokenizer with a tokenizer.json"
            )
        results = []
        with library_errors(self._location):
            for ids, offsets in self._with_offsets(list(texts)):
                starts, stops = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
                results.append(EncodedText(np.array(ids, dtype=self.dtype), starts, stops))
        return results

    def encode_plain(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokenize as `encode_texts`, without spans, which takes a third of the time."""
        with library_errors(self._location):
            return [np.array(each, dtype=self.dtype) for each in self._ids(list(texts))]

    def _with_offsets(self, texts: list[str]) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
        if self._backend is not None:
            encodings = self._backend.encode_batch(texts, add_special_tokens=False)
            yield from ((each.ids, each.offsets) for each in encodings)
            return
        for text in texts:
            each = self.hf(text, add_special_tokens=False, return_offsets_mapping=True)
            yield each["input_ids"], each["offset_mapping"]

    def encode_prompt(self, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize the prompt; an empty prompt becomes EOS, the token that ends other documents."""
        with library_errors(self._location):
            tokens = next(self._ids([prompt], adds=add_special_tokens))
        return tokens or [self.eos_id or 0]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens, by default without special tokens."""
        with library_errors(self._location):
            ids = [int(each) for each in tokens]
            return str(self.hf.decode(ids, skip_special_tokens=skip_special_tokens))

    def decode_stream(self, tokens: Iterable[int], before: Sequence[int] = ()) -> Iterator[str]:
        """Yield the text of generated tokens as soon as their characters are complete.

        `before` are the tokens of the prompt. A tokenizer without a backend can't decode single
        tokens: its text is yielded at the end.
        """
        stream, pending = DecodeStream([*before], skip_special_tokens=True), list[int]()
        for token in tokens:
            pending.append(token)
            with library_errors(self._location):
                piece = stream.step(self._backend, token) if self._backend is not None else None
            if piece is not None:
                pending.clear()
                yield piece
        yield self.decode(pending)

    def files(self) -> dict[str, bytes]:
        """Return the unchanged files of the tokenizer, without the model's config.json."""
        return dict(self._files)

    def files_as_saved(self) -> dict[str, bytes]:
        """Return the files that `save_pretrained` writes, which name the tokenizer's class."""
        scratch = tempfile.TemporaryDirectory(prefix="fsdpctl-")
        with library_errors(self._location), scratch as folder:
            self.hf.save_pretrained(folder)
            return read_files(Path(folder))

    def _ids(self, texts: list[str], *, adds: bool = False) -> Iterator[list[int]]:
        if self._backend is None:
            return (self.hf(each, add_special_tokens=adds)["input_ids"] for each in texts)
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=adds)
        return (each.ids for each in encodings)


def _backend(hf: Any) -> JsonTokenizer | None:
    """Return the tokenizer of the library `tokenizers` if its tokens are the same, else None.

    As transformers does in each call, the function disables a stored truncation and padding.
    """
    from transformers import PreTrainedTokenizerFast as Fast

    cls = type(hf)
    methods = Fast._encode_plus, Fast.__call__
    if not isinstance(hf, Fast) or (cls._encode_plus, cls.__call__) != methods:
        return None
    backend: JsonTokenizer = hf.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = hf.split_special_tokens
    return backend


Tokenizer = ByteTokenizer | FileTokenizer


def open_tokenizer(name: str | None) -> Tokenizer:
    """Open the byte tokenizer (`bytes` or None), or the tokenizer of a directory or GGUF file.

    UsageError if the directory has no valid tokenizer.
    """
    if name in (None, BYTE_TOKENIZER):
        return ByteTokenizer()
    folder = Path(str(name))
    if not has_tokenizer(folder):
        raise UsageError(f"tokenizer {folder}: {TOKENIZER_JSON} not found; or use bytes")
    return FileTokenizer(str(folder), read_files(folder, CONFIG_JSON))
