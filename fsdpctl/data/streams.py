"""Streams of tokens, and the samples that they are split into."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from fsdpctl.data.packing import IGNORE_INDEX, Sample, Samples
from fsdpctl.data.token_formats import TokenFile
from fsdpctl.data.token_reads import ShardTokens
from fsdpctl.data.tokenizer import Tokens


@dataclass(frozen=True, slots=True)
class TokenStream:
    """Concatenated tokens of text, with their origin."""

    tokens: Tokens | ShardTokens  # 1-D
    num_bytes: int | None  # bytes of the text, if known
    checksum: str | None = None  # xxh3 of the tokens, if known
    origin: str = "the data"
    isolates_documents: bool = False  # whether attention stays within a document

    @property
    def fingerprint(self) -> str:
        """The checksum of the tokens or their files; of a part, also the position of the split."""
        if self.checksum is not None:
            return self.checksum
        return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(self.tokens).data)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def split(self, at: int) -> tuple["TokenStream", "TokenStream"]:
        """Return the first `at` tokens and the rest, without reading them if `checksum` is set."""
        # Both parts get one checksum.
        checksum = None if self.checksum is None else f"{self.checksum}/{at}"
        fields = None, checksum, self.origin, self.isolates_documents
        rest = TokenStream(_slice(self.tokens, at, self.num_tokens), *fields)
        return TokenStream(_slice(self.tokens, 0, at), *fields), rest

    def samples(self, seq_len: int) -> "StreamSamples":
        """Return samples of `seq_len` tokens, each with the token after it as the last target."""
        return StreamSamples(self, seq_len)


def concatenated(files: Sequence[TokenFile], origin: str, *, isolates: bool = False) -> TokenStream:
    known_sizes = [each.num_bytes for each in files if each.num_bytes is not None]
    size = sum(known_sizes) if len(known_sizes) == len(files) else None
    checksum = files[0].xxh3 if len(files) == 1 and files[0].xxh3 else _fingerprint(files)
    tokens = ShardTokens([each.shard for each in files])
    return TokenStream(tokens, size, checksum, origin, isolates)


def _fingerprint(files: Sequence[TokenFile]) -> str:
    digest = xxhash.xxh3_64()
    for file in files:
        checksum = file.xxh3 or file.start_checksum
        digest.update(f"{file.shard.count} {file.shard.dtype.str} {checksum};".encode())
    return digest.hexdigest()


def _slice(tokens: Tokens | ShardTokens, start: int, stop: int) -> Tokens | ShardTokens:
    return tokens.span(start, stop) if isinstance(tokens, ShardTokens) else tokens[start:stop]


class StreamSamples(Samples):
    """The samples of a token stream, without the remainder at its end."""

    def __init__(self, stream: TokenStream, seq_len: int) -> None:
        self.stream, self.seq_len, self.origin = stream, seq_len, stream.origin
        self.isolates_documents = stream.isolates_documents
        self.is_remote = isinstance(stream.tokens, ShardTokens) and stream.tokens.is_remote

    @property
    def empty_message(self) -> str:
        num_tokens = self.stream.num_tokens
        return f"train.seq_len={self.seq_len}: longer than the data of {num_tokens} tokens"

    def __len__(self) -> int:
        return max(0, (self.stream.num_tokens - 1) // self.seq_len)

    def __getitem__(self, number: int) -> Sample:
        """Return a sample. If documents are isolated, their first tokens are not predicted."""
        start, tokens = number * self.seq_len, self.stream.tokens
        ids = tokens[start : start + self.seq_len + 1].astype(np.int64)
        targets = ids[1:].copy()
        if isinstance(tokens, ShardTokens) and tokens.loss_mask is not None:
            targets[tokens.loss_mask[start : start + len(ids)][1:] == 0] = IGNORE_INDEX
        if not (self.stream.isolates_documents and isinstance(tokens, ShardTokens)):
            return Sample(ids[:-1], targets)
        ends = [each - start for each in tokens.ends(start, start + self.seq_len)]
        targets[[each - 1 for each in ends]] = IGNORE_INDEX
        lengths = np.diff([0, *ends, self.seq_len])
        return Sample(ids[:-1], targets, tuple(int(each) for each in lengths if each))

    def fetch(self, numbers: Iterable[int]) -> None:
        tokens, size = self.stream.tokens, self.seq_len
        if isinstance(tokens, ShardTokens):
            for number in numbers:
                tokens.fetch(number * size, number * size + size + 1)
