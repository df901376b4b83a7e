"""Files of conversations, rendered and tokenized: the arrays of a data set."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpctl.chats.formats import Chat, ChatRow, PlainText
from fsdpctl.chats.rows import read_rows
from fsdpctl.chats.samples import ChatSample
from fsdpctl.chats.template_processes import TemplateSetup, render_chats
from fsdpctl.data.documents import is_held_out
from fsdpctl.data.packing import Mask
from fsdpctl.data.tokenizer import EncodedText, FileTokenizer, Tokens
from fsdpctl.errors import UsageError
from fsdpctl.io.activity import CONVERSATIONS, Advance, doing
from fsdpctl.io.texts import batch_by_size

SPLITS = ("train", "val")
_BEYOND_TEXT = np.iinfo(np.int64).max  # a position after all characters
# Texts are tokenized in batches, since the library takes 150 bytes for a token with its span.
_BATCH_CHARS = 1 << 20
_Tokenized = tuple[Tokens, Mask, Any]  # the tokens of a sample, the loss mask, and the row's label


@dataclass(frozen=True, slots=True)
class ChatSource:
    """The files of a data set and how to render them."""

    key: str  # the setting that errors name
    train: Sequence[Path]
    validation: Sequence[Path]
    val_fraction: float  # held out of `train` if there are no validation files
    prompt: str  # `data.prompt`
    setup: Callable[[], tuple[TemplateSetup, str]]  # the template and its location


@dataclass(frozen=True, slots=True)
class TokenizedChats:
    """The arrays of a data set by name (`train.tokens`, …), and facts about it for notes."""

    arrays: dict[str, NDArray[Any]]
    # The cache stores `counts`, so the keys must stay. `marked` and `found` count conversations
    # whose loss mask comes from the template's generation blocks, or from located messages.
    counts: dict[str, int]
    formats: list[str]  # per file, validation files last
    end_tokens: list[int]
    keys: list[dict[str, dict[str, int]]]  # per file, how many rows have each key of `RowKeys`


@dataclass(slots=True)
class _Split:
    tokens: list[Tokens] = field(default_factory=list)
    loss_masks: list[Mask] = field(default_factory=list)

    def arrays(self, dtype: type[np.unsignedinteger]) -> dict[str, NDArray[Any]]:
        starts = np.cumsum([0, *map(len, self.tokens)], dtype=np.int64)
        tokens = np.concatenate(self.tokens).astype(dtype)
        return {"tokens": tokens, "trained": np.concatenate(self.loss_masks), "starts": starts}


class ChatDataBuilder:
    """A builder of the arrays of a data set, which reads, renders and tokenizes file by file."""

    def __init__(self, source: ChatSource, tokenizer: FileTokenizer) -> None:
        self._source, self._tokenizer = source, tokenizer
        self._chat_tokenizer = ChatTokenizer(tokenizer)
        self._splits = {name: _Split() for name in SPLITS}
        self._counts: Counter[str] = Counter()
        self._end_tokens: Counter[int] = Counter()
        self._keys: list[dict[str, Counter[str]]] = []
        self._advance: Advance = lambda count: None

    def build(self) -> TokenizedChats:
        """Read, render and tokenize all files.

        UsageError if a row can't be trained on, or if no sample is left to train on.
        """
        with doing("tokenizing", CONVERSATIONS) as self._advance:
            formats = [self._add(each) for each in self._source.train]
            formats += [self._add(each, "val") for each in self._source.validation]
        if not self._splits["train"].tokens:
            dropped = self._counts["without_loss"]
            reason = f"; {dropped} samples have no token that is trained on" if dropped else ""
            verb = "train" if self._source.key == "data.path" else "validate"
            raise UsageError(f"{self._source.key}: nothing to {verb} on{reason}")
        arrays = {
            f"{name}.{kind}": array
            for name, split in self._splits.items()
            if split.tokens
            for kind, array in split.arrays(self._tokenizer.dtype).items()
        }
        end_tokens = [token for token, _ in self._end_tokens.most_common(4)]
        keys = [{k: dict(counts) for k, counts in each.items()} for each in self._keys]
        return TokenizedChats(arrays, dict(self._counts), formats, end_tokens, keys)

    def _add(self, file: Path, split: str | None = None) -> str:
        """Add a file's samples to `split`, or to the split that each row's hash selects.

        Returns the format of the file.
        """
        name, rows = read_rows(str(file), self._counts, self._source.prompt)
        for tokens, loss_mask, row_split in self.samples(self._with_splits(rows, split)):
            self._store(tokens, loss_mask, row_split)
        return name

    def samples(self, rows: Iterator[tuple[ChatRow, Any]]) -> Iterator[_Tokenized]:
        """Yield the samples of rows of one kind, with the labels that the caller gave the rows."""
        if (first := next(rows, None)) is None:
            return
        rows = chain([first], rows)
        if isinstance(first[0].content, PlainText):
            texts = ((x.content, label) for x, label in rows if isinstance(x.content, PlainText))
            yield from self._chat_tokenizer.texts(texts)
        else:
            yield from self._chat_tokenizer.samples(self._rendered(rows))

    def _with_splits(
        self, rows: Iterator[tuple[ChatRow, bytes]], given_split: str | None
    ) -> Iterator[tuple[ChatRow, str]]:
        self._keys.append({"followed": Counter(), "ignored": Counter()})
        fraction = 0.0 if self._source.validation else self._source.val_fraction
        for row, row_bytes in rows:
            self._advance(1)
            for name, counts in self._keys[-1].items():
                for key in getattr(row.keys, name):
                    counts[key[:80]] += 1
            split = given_split or ("val" if is_held_out(row_bytes, fraction) else "train")
            self._counts["val_chats" if split == "val" else "chats"] += 1
            yield row, split

    def _rendered(self, rows: Iterator[tuple[ChatRow, Any]]) -> Iterator[tuple[ChatSample, Any]]:
        labels = deque[Any]()  # `render_chats` returns chats in order, but without labels

        def chats() -> Iterator[tuple[Chat, str]]:
            for row, label in rows:
                assert isinstance(row.content, Chat)
                labels.append(label)
                yield row.content, row.location

        for rendered_chat in render_chats(*self._source.setup(), chats()):
            label = labels.popleft()
            self._counts.update(rendered_chat.counts)
            self._counts["marked"] += any(each.is_marked for each in rendered_chat.samples)
            self._counts["found"] += any(not each.is_marked for each in rendered_chat.samples)
            for sample in rendered_chat.samples:
                yield sample, label

    def _store(self, tokens: Tokens, loss_mask: Mask, split: str) -> None:
        # The first token of a sample is never a target.
        if not loss_mask[1:].any():
            self._counts["without_loss"] += 1
            return
        self._end_tokens.update(self._chat_tokenizer.end_tokens(tokens, loss_mask))
        self._splits[split].tokens.append(tokens)
        self._splits[split].loss_masks.append(loss_mask)


class ChatTokenizer:
    """A tokenizer of samples in batches, which the library distributes over threads."""

    def __init__(self, tokenizer: FileTokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_control = np.zeros(tokenizer.vocab_size, dtype=bool)
        self._is_control[list(tokenizer.control_tokens.values())] = True

    def samples(self, samples: Iterable[tuple[ChatSample, Any]]) -> Iterator[_Tokenized]:
        """Yield the tokens of each sample, their loss mask, and the label."""
        for batch in batch_by_size(samples, _size, _BATCH_CHARS):
            encoded = self._tokenizer.encode_texts([sample.text for sample, _ in batch])
            for (sample, label), each in zip(batch, encoded, strict=True):
                yield each.tokens, self._loss_mask(sample, each), label

    def texts(self, texts: Iterable[tuple[PlainText, Any]]) -> Iterator[_Tokenized]:
        """Yield the tokens of each text with its boundary tokens, their mask, and the label."""
        for batch in batch_by_size(texts, _size, _BATCH_CHARS):
            joint = [text.text for text, _ in batch if _needs_offsets(text)]
            pairs = ((x.text, x.num_masked_chars) for x, _ in batch if not _needs_offsets(x))
            halves = [half for text, start in pairs for half in (text[:start], text[start:])]
            encoded_texts = iter(self._tokenizer.encode_texts(joint) if joint else ())
            encoded_halves = iter(self._tokenizer.encode_plain(halves))
            for text, label in batch:
                if _needs_offsets(text):
                    encoded = next(encoded_texts)
                    tokens, mask = encoded.tokens, encoded.stops > text.num_masked_chars
                else:
                    masked, trained = next(encoded_halves), next(encoded_halves)
                    tokens = np.concatenate([masked, trained])
                    mask = np.arange(len(tokens)) >= len(masked)
                prefix, suffix = self._tokenizer.boundary_tokens(tokens)
                masks = [np.zeros(len(prefix), bool), mask, np.ones(len(suffix), bool)]
                token_parts = [np.array(x, tokens.dtype) for x in (prefix, tokens, suffix)]
                yield np.concatenate(token_parts), np.concatenate(masks), label

    def _loss_mask(self, sample: ChatSample, encoded: EncodedText) -> Mask:
        """Return True for each token that has a character in a span, even if a span's edge cuts it.

        transformers does so too, but marks only the first of several tokens that share the last
        character. A control token whose text includes whitespace after it is not trained on because
        of that whitespace, unless the template marks the whitespace.
        """
        spans = np.array([*sample.spans, (_BEYOND_TEXT, _BEYOND_TEXT)], dtype=np.int64)
        # The start of the first span that ends after the token starts.
        span_starts = spans[np.searchsorted(spans[:, 1], encoded.starts, side="right"), 0]
        loss_mask: Mask = span_starts < encoded.stops
        if not sample.is_marked:
            loss_mask &= ~(self._is_control[encoded.tokens] & (encoded.starts < span_starts))
        return loss_mask

    def end_tokens(self, tokens: Tokens, loss_mask: Mask) -> list[int]:
        """Return the control tokens that end spans of trained tokens."""
        last = loss_mask & ~np.append(loss_mask[1:], False)
        return [int(each) for each in tokens[last & self._is_control[tokens]]]


def _size(item: tuple[ChatSample | PlainText, Any]) -> int:
    return len(item[0].text)


def _needs_offsets(text: PlainText) -> bool:
    """Return whether a token may span masked and trained text, so that offsets decide the loss."""
    return text.num_masked_chars > 0 and not text.tokenized_separately
