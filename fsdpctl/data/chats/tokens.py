"""Samples as tokens, each of which is a target that has a loss, or is not."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpctl.data.chats.rows import Plain
from fsdpctl.data.chats.samples import Sample
from fsdpctl.data.tokenizer import Encoded, FileTokenizer, Tokens

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """The samples of a part of the data, one behind the other; arrays may be memory maps."""

    tokens: Tokens  # 1-D, uint16 or uint32
    trained: Flags  # 1-D, of the same length: whether the token, as a target, has a loss
    starts: NDArray[np.int64]  # where each sample begins, and behind them where the last ends
    checksum: str

    @property
    def num_samples(self) -> int:
        """How many there are."""
        return len(self.starts) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample."""
        return np.diff(self.starts)

    @property
    def num_trained(self) -> int:
        """Tokens that have a loss."""
        return int(np.count_nonzero(self.trained))

    def sample(self, number: int) -> tuple[Tokens, Flags]:
        """The tokens of a sample, and which have a loss."""
        span = slice(int(self.starts[number]), int(self.starts[number + 1]))
        return self.tokens[span], self.trained[span]


class Encoder:
    """Makes tokens of samples, some at a time: the library encodes them on several threads."""

    _AT_ONCE = 256

    def __init__(self, tokenizer: FileTokenizer) -> None:
        """With the tokenizer of the model."""
        self._tokenizer = tokenizer
        self._is_control = np.zeros(tokenizer.vocab_size, dtype=bool)
        self._is_control[list(tokenizer.controls.values())] = True
        self._beginning = np.array(tokenizer.beginning(), dtype=np.int64)
        self._end = np.array([] if tokenizer.end is None else [tokenizer.end], dtype=np.int64)

    def samples(self, samples: Iterable[tuple[Sample, Any]]) -> Iterator[tuple[Tokens, Flags, Any]]:
        """Tokens and flags of each, with what came along with it."""
        for batch in _batches(samples, self._AT_ONCE):
            encoded = self._tokenizer.encode_texts([sample.text for sample, _ in batch])
            for (sample, label), each in zip(batch, encoded, strict=True):
                yield each.tokens, self._flags(sample, each), label

    def texts(self, rows: Iterable[tuple[Plain, Any]]) -> Iterator[tuple[Tokens, Flags, Any]]:
        """The same of plain text, between what the tokenizer begins and ends a text with."""
        for batch in _batches(rows, self._AT_ONCE):
            encoded = self._tokenizer.encode_texts([row.text for row, _ in batch])
            for (row, label), each in zip(batch, encoded, strict=True):
                flags = each.stops > row.untrained
                tokens = np.concatenate([self._beginning, each.tokens, self._end])
                ends = np.zeros(len(self._beginning), bool), np.ones(len(self._end), bool)
                yield (
                    tokens.astype(each.tokens.dtype),
                    np.concatenate([ends[0], flags, ends[1]]),
                    label,
                )

    def _flags(self, sample: Sample, encoded: Encoded) -> Flags:
        """Every token that has a character in a span: one cut by a span's edge counts.

        So transformers has it, but for a last character that is made of several tokens: there it
        marks only the first. A control token that swallows the space behind it is not trained for
        that, unless the template marks the space.
        """
        flags = np.zeros(len(encoded.tokens), dtype=bool)
        for start, stop in sample.spans:
            within = (encoded.stops > start) & (encoded.starts < stop)
            if not sample.is_marked:
                within &= ~(self._is_control[encoded.tokens] & (encoded.starts < start))
            flags |= within
        return flags

    def ends(self, tokens: Tokens, flags: Flags) -> list[int]:
        """The control tokens that spans of trained tokens end with."""
        last = flags & ~np.append(flags[1:], False)
        return [int(each) for each in tokens[last & self._is_control[tokens]]]


def _batches(items: Iterable[Any], size: int) -> Iterator[Sequence[Any]]:
    source = iter(items)
    while batch := list(islice(source, size)):
        yield batch
