"""Samples of one length, and documents of different lengths that are packed into them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from fsdpctl.data.order import Indices, IntArray, pack_sequences, samples_at
from fsdpctl.data.tokenizer import Tokens

Mask = NDArray[np.bool_]
IGNORE_INDEX = -100  # the target of a masked token, as in torch's cross_entropy
DROP, TRUNCATE = "drop", "truncate"


@dataclass(frozen=True, slots=True)
class Sample:
    """A sequence of tokens with their targets."""

    tokens: IntArray  # (seq_len,)
    targets: IntArray  # (seq_len,): the token after each token, or IGNORE_INDEX
    lengths: tuple[int, ...] = ()  # the lengths of the documents in a packed sequence
    padding: int = 0  # padding tokens at the end, which count as a document

    def documents(self) -> list[list[int]]:
        """Return the tokens of each document, and its last target unless that is masked."""
        documents, start = [], 0
        for length in self.lengths or (len(self.tokens),):
            end = start + length
            documents.append(self.tokens[start:end].tolist())
            if self.targets[end - 1] != IGNORE_INDEX:
                documents[-1].append(int(self.targets[end - 1]))
            start = end
        return documents[:-1] if self.padding else documents


class Samples(ABC):
    """Data as a sequence of samples of one length."""

    seq_len: int
    origin: str  # names the data in errors
    isolates_documents = False  # whether attention stays within a document
    is_remote = False  # whether samples are fetched from an object store

    @property
    @abstractmethod
    def empty_message(self) -> str:
        """The error message if there are no samples."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all samples, without padding."""
        return len(self) * self.seq_len

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, number: int) -> Sample: ...

    def fetch(self, numbers: Iterable[int]) -> None:  # noqa: B027  # most data is local
        """Start to fetch samples from an object store."""

    def script_batch(self, numbers: Sequence[int]) -> Any:
        """Return the batch of a script's samples; None: the samples have tokens."""
        return None

    def order(self, position: int, length: int, seed: int) -> Indices:
        return samples_at(position, length, len(self), seed)

    def count_tokens(self, numbers: Sequence[int]) -> int:
        """Count the tokens of some samples, without padding."""
        return len(numbers) * self.seq_len


@dataclass(frozen=True, slots=True)
class Packing:
    """How documents become sequences."""

    shares_sequences: bool = True  # False: one document per sequence
    too_long: str = TRUNCATE  # or DROP, for documents with more tokens than a sequence
    seed: int = 0  # determines which documents share a sequence


@dataclass(frozen=True, eq=False)
class DocumentSet:
    """Concatenated documents. A token is predicted from the tokens before it in its document."""

    tokens: Tokens  # 1-D; may be memory-mapped
    loss_mask: Mask  # (tokens,): whether a token is a target, if it isn't a document's first
    starts: IntArray  # (documents + 1,): the start of each document, and the end of the last one
    packing: Packing = Packing()
    origin: str = "the data"
    checksum: str | None = None  # checksums of the three arrays, concatenated
    num_bytes: ClassVar[None] = None  # the number of bytes of the trained text is unknown

    @cached_property
    def fingerprint(self) -> str:
        """A checksum of the content, the loss mask and the packing."""
        packing = self.packing
        # Checkpoints store this value, so the text must stay if names in the code change.
        too_long = DROP if packing.too_long == DROP else "cut"
        text = f"Packing(shares_rows={packing.shares_sequences}, {too_long=}, seed={packing.seed})"
        digest = xxhash.xxh3_64(f"{text} {self.checksum or ''}".encode())
        if self.checksum is None:
            for part in (self.tokens, self.loss_mask, self.starts):
                digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> IntArray:
        return np.diff(self.starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> tuple[Tokens, Mask]:
        span = slice(int(self.starts[number]), int(self.starts[number + 1]))
        return self.tokens[span], self.loss_mask[span]

    def samples(self, seq_len: int) -> "PackedSamples":
        return _packed(self, seq_len)


@lru_cache(maxsize=32)  # holds the arrays of 32 document sets
def _packed(documents: DocumentSet, seq_len: int) -> "PackedSamples":
    return PackedSamples(documents, seq_len)


class PackedSamples(Samples):
    """Sequences of whole documents, padded with ignored targets.

    A document of N tokens takes N - 1 tokens of its sequence: the last one is only a target.
    """

    isolates_documents = True

    def __init__(self, documents: DocumentSet, seq_len: int) -> None:
        """Pack all documents that have a trained token within `seq_len`."""
        self.seq_len, self.origin = seq_len, documents.origin
        self._documents = documents
        lengths: IntArray = documents.lengths - 1
        too_long = lengths > seq_len
        self.num_too_long = int(too_long.sum())
        self._lengths: IntArray = np.minimum(lengths, seq_len)
        num_targets = self._count_targets(too_long)
        used = num_targets > 0
        drops = documents.packing.too_long == DROP
        if drops:
            used &= ~too_long
        self.num_untrained = int((~used).sum()) - (self.num_too_long if drops else 0)
        self.num_targets = int(num_targets[used].sum())
        self._num_tokens = int(self._lengths[used].sum())
        numbers = np.flatnonzero(used)
        if documents.packing.shares_sequences and len(numbers):
            packed = pack_sequences(self._lengths[numbers], seq_len, documents.packing.seed)
            self._sequences: Sequence[Sequence[int]] = [numbers[row].tolist() for row in packed]
        else:
            self._sequences = [[int(number)] for number in numbers]

    def _count_targets(self, too_long: Mask) -> IntArray:
        starts, loss_mask = self._documents.starts, self._documents.loss_mask
        if not len(self._lengths):
            return self._lengths
        counts: IntArray = np.add.reduceat(loss_mask, starts[:-1], dtype=np.int64)
        counts -= loss_mask[starts[:-1]]  # the first token of a document is never a target
        for number in np.flatnonzero(too_long):
            start = starts[number]
            counts[number] = loss_mask[start + 1 : start + self.seq_len + 1].sum()
        return counts

    @property
    def empty_message(self) -> str:
        return (
            f"{self.origin}: nothing to train on within train.seq_len={self.seq_len}: of "
            f"{len(self._documents)} samples, {self.num_too_long} are longer and "
            f"{self.num_untrained} have no trained token within this length"
        )

    @property
    def num_tokens(self) -> int:
        """The number of input tokens: the last token of each document is only a target."""
        return self._num_tokens

    def __len__(self) -> int:
        return len(self._sequences)

    def count_tokens(self, numbers: Sequence[int]) -> int:
        return int(sum(self._lengths[self._sequences[number]].sum() for number in numbers))

    def __getitem__(self, number: int) -> Sample:
        """Return a sequence. Its padding counts as a document without targets."""
        tokens = np.zeros(self.seq_len, dtype=np.int64)
        targets = np.full(self.seq_len, IGNORE_INDEX, dtype=np.int64)
        position, lengths = 0, []
        for document in self._sequences[number]:
            length, start = int(self._lengths[document]), int(self._documents.starts[document])
            ids = self._documents.tokens[start : start + length + 1].astype(np.int64)
            loss_mask = self._documents.loss_mask[start + 1 : start + length + 1]
            tokens[position : position + length] = ids[:-1]
            targets[position : position + length] = np.where(loss_mask, ids[1:], IGNORE_INDEX)
            lengths.append(length)
            position += length
        padding = self.seq_len - position
        return Sample(tokens, targets, (*lengths, padding) if padding else tuple(lengths), padding)
