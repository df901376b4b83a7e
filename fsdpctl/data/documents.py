"""Documents of different lengths, some of whose tokens are trained, as rows of one length."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from fsdpctl.data.packing import Numbers, pack
from fsdpctl.data.rows import IGNORED, Sample
from fsdpctl.data.tokenizer import Tokens

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Packing:
    """How documents become rows."""

    shares_rows: bool = True  # else each has one for itself
    too_long: str = "cut"  # or "drop": what has more tokens than a row
    seed: int = 0  # decides which of them come together


@dataclass(frozen=True)
class DocumentSet:
    """Documents one after another. A token is predicted from those before it in its document."""

    tokens: Tokens  # 1-D; may be a memory map
    trained: Flags  # of the same shape: whether it is a target; not the first of a document
    starts: Numbers  # (documents + 1,): where each begins, and the end of the last
    packing: Packing
    origin: str = "the data"
    checksum: str = ""  # of all of that, where known

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the content, which part of it is trained, and how it is packed."""
        digest = xxhash.xxh3_64(f"{self.packing} {self.checksum}".encode())
        if not self.checksum:
            for part in (self.tokens, self.trained, self.starts):
                digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    @property
    def num_tokens(self) -> int:
        """Of all documents."""
        return len(self.tokens)

    @property
    def num_bytes(self) -> None:
        """Not known: what is trained is not the whole text."""
        return

    def __len__(self) -> int:
        """How many documents there are."""
        return len(self.starts) - 1

    def rows(self, seq_len: int) -> "PackedRows":
        """Its documents in rows of `seq_len` tokens."""
        return _packed(self, seq_len)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


@lru_cache(maxsize=4)
def _packed(documents: DocumentSet, seq_len: int) -> "PackedRows":
    return PackedRows(documents, seq_len)


class PackedRows:
    """Rows that hold whole documents, filled up with ignored targets.

    Of a document of N tokens N - 1 lie in its row: the last one is only ever a target.
    """

    holds_documents = True

    def __init__(self, documents: DocumentSet, seq_len: int) -> None:
        self.seq_len, self.origin = seq_len, documents.origin
        self._documents = documents
        lengths: Numbers = np.diff(documents.starts) - 1
        too_long = lengths > seq_len
        self.num_too_long = int(too_long.sum())
        self._lengths: Numbers = np.minimum(lengths, seq_len)
        trained = self._count_trained(too_long)
        kept = trained > 0
        if documents.packing.too_long == "drop":
            kept &= ~too_long
        self.num_untrained = int((~kept).sum()) - (
            self.num_too_long if documents.packing.too_long == "drop" else 0
        )
        self.num_targets = int(trained[kept].sum())
        self.num_tokens = int(self._lengths[kept].sum())
        numbers = np.flatnonzero(kept)
        if documents.packing.shares_rows and len(numbers):
            packed = pack(self._lengths[numbers], seq_len, documents.packing.seed)
            self._rows: Sequence[Sequence[int]] = [numbers[row].tolist() for row in packed]
        else:
            self._rows = [[int(number)] for number in numbers]

    def _count_trained(self, too_long: Flags) -> Numbers:
        """Of each document, in what there is room for."""
        starts, flags = self._documents.starts, self._documents.trained
        if not len(self._lengths):
            return self._lengths
        counts: Numbers = np.add.reduceat(flags, starts[:-1], dtype=np.int64)
        counts -= flags[starts[:-1]]  # the first token is nobody's target
        for number in np.flatnonzero(too_long):
            start = starts[number]
            counts[number] = flags[start + 1 : start + self.seq_len + 1].sum()
        return counts

    @property
    def emptiness(self) -> str:
        """That nothing is left."""
        return (
            f"{self.origin}: nothing to train on within train.seq_len={self.seq_len}: of "
            f"{len(self._documents)} samples {self.num_too_long} are longer, and "
            f"{self.num_untrained} have no trained token there"
        )

    @property
    def padding(self) -> float:
        """The share of all rows that is filled up."""
        size = len(self) * self.seq_len
        return 1 - self.num_tokens / size if size else 0.0

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self._rows)

    def count_tokens(self, numbers: Sequence[int]) -> int:
        """Tokens of some rows, without what fills them up."""
        return int(sum(self._lengths[self._rows[number]].sum() for number in numbers))

    def __getitem__(self, number: int) -> Sample:
        """A row; what fills it up is one more document, of which nothing is trained."""
        tokens = np.zeros(self.seq_len, dtype=np.int64)
        targets = np.full(self.seq_len, IGNORED, dtype=np.int64)
        at, lengths = 0, []
        for document in self._rows[number]:
            length, start = int(self._lengths[document]), int(self._documents.starts[document])
            whole = self._documents.tokens[start : start + length + 1].astype(np.int64)
            trained = self._documents.trained[start + 1 : start + length + 1]
            tokens[at : at + length] = whole[:-1]
            targets[at : at + length] = np.where(trained, whole[1:], IGNORED)
            lengths.append(length)
            at += length
        filling = self.seq_len - at
        return Sample(tokens, targets, (*lengths, filling) if filling else tuple(lengths), filling)
