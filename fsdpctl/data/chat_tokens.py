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
from fsdpctl.io.texts import batched_by_size

SPLITS = ("train", "val")
_FAR = np.iinfo(np.int64).max  # a position after all characters
# Characters that are tokenized together: a token with its span takes 150 bytes in the library.
_BATCH = 1 << 20


@dataclass(frozen=True, slots=True)
class ChatSource:
    """The files of a data set and how to render them."""

    key: str  # the setting that messages name
    train: Sequence[Path]
    validation: Sequence[Path]
    val_fraction: float  # held out of `train` if there are no validation files
    prompt: str  # `data.prompt`
    setup: Callable[[], tuple[TemplateSetup, str]]  # the template and its location


@dataclass(frozen=True, slots=True)
class TokenizedChats:
    """The arrays of a data set by name (`train.tokens`, …), and facts about it for notes."""

    arrays: dict[str, NDArray[Any]]
    counts: dict[str, int]
    formats: list[str]  # per file, validation files last
    end_tokens: list[int]
    keys: list[dict[str, dict[str, int]]]  # per file, how many rows have each key of `RowKeys`


@dataclass(slots=True)
class _Split:
    tokens: list[Tokens] = field(default_factory=list)
    trained: list[Mask] = field(default_factory=list)

    def arrays(self, dtype: type[np.unsignedinteger]) -> dict[str, NDArray[Any]]:
        starts = np.cumsum([0, *map(len, self.tokens)], dtype=np.int64)
        tokens = np.concatenate(self.tokens).astype(dtype)
        return {"tokens": tokens, "trained": np.concatenate(self.trained), "starts": starts}


class ChatTokenizer:
    """The tokenized samples of a data set, collected file by file."""

    def __init__(self, source: ChatSource, tokenizer: FileTokenizer) -> None:
        self._source, self._tokenizer = source, tokenizer
        self._encoder = ChatEncoder(tokenizer)
        self._parts = {name: _Split() for name in SPLITS}
        self._counts: Counter[str] = Counter()
        self._ends: Counter[int] = Counter()
        self._keys: list[dict[str, Counter[str]]] = []
        self._advance: Advance = lambda count: None

    def build(self) -> TokenizedChats:
        """Read, render and tokenize all files.

        UsageError if a row can't be trained on, or if no sample is left to train on.
        """
        with doing("tokenizing", CONVERSATIONS) as self._advance:
            formats = [self._add(each) for each in self._source.train]
            formats += [self._add(each, "val") for each in self._source.validation]
        if not self._parts["train"].tokens:
            dropped = self._counts["without_loss"]
            reason = f"; {dropped} samples have no token that is trained on" if dropped else ""
            verb = "train" if self._source.key == "data.path" else "validate"
            raise UsageError(f"{self._source.key}: nothing to {verb} on{reason}")
        arrays = {
            f"{name}.{kind}": array
            for name, part in self._parts.items()
            if part.tokens
            for kind, array in part.arrays(self._tokenizer.dtype).items()
        }
        ends = [token for token, _ in self._ends.most_common(4)]
        keys = [{k: dict(counts) for k, counts in each.items()} for each in self._keys]
        return TokenizedChats(arrays, dict(self._counts), formats, ends, keys)

    def _add(self, file: Path, split: str | None = None) -> str:
        """Add a file's samples to `split`, or to the split that each row's hash selects.

        Returns the format of the file.
        """
        name, lines = read_rows(str(file), self._counts, self._source.prompt)
        for tokens, trained, destination in self.samples(self._with_splits(lines, split)):
            self._store(tokens, trained, destination)
        return name

    def samples(self, rows: Iterator[tuple[ChatRow, Any]]) -> Iterator[tuple[Tokens, Mask, Any]]:
        """Yield the tokens of rows of one kind, their loss mask, and the row's label."""
        if (first := next(rows, None)) is None:
            return
        rows = chain([first], rows)
        if isinstance(first[0].content, PlainText):
            texts = ((x.content, label) for x, label in rows if isinstance(x.content, PlainText))
            yield from self._encoder.texts(texts)
        else:
            yield from self._encoder.samples(self._rendered(rows))

    def _with_splits(
        self, lines: Iterator[tuple[ChatRow, bytes]], given_split: str | None
    ) -> Iterator[tuple[ChatRow, str]]:
        self._keys.append({"followed": Counter(), "ignored": Counter()})
        fraction = 0.0 if self._source.validation else self._source.val_fraction
        for line, content in lines:
            self._advance(1)
            for name, counts in self._keys[-1].items():
                for key in getattr(line.keys, name):
                    counts[key[:80]] += 1
            split = given_split or ("val" if is_held_out(content, fraction) else "train")
            self._counts["val_chats" if split == "val" else "chats"] += 1
            yield line, split

    def _rendered(self, rows: Iterator[tuple[ChatRow, Any]]) -> Iterator[tuple[ChatSample, Any]]:
        parts = deque[Any]()

        def chats() -> Iterator[tuple[Chat, str]]:
            for line, part in rows:
                assert isinstance(line.content, Chat)
                parts.append(part)
                yield line.content, line.location

        for rendered_chat in render_chats(*self._source.setup(), chats()):
            part = parts.popleft()
            self._counts.update(rendered_chat.counts)
            self._counts["marked"] += any(each.is_marked for each in rendered_chat.samples)
            self._counts["found"] += any(not each.is_marked for each in rendered_chat.samples)
            for sample in rendered_chat.samples:
                yield sample, part

    def _store(self, tokens: Tokens, trained: Mask, part: str) -> None:
        # The first token of a sample is never a target.
        if not trained[1:].any():
            self._counts["without_loss"] += 1
            return
        self._ends.update(self._encoder.ends(tokens, trained))
        self._parts[part].tokens.append(tokens)
        self._parts[part].trained.append(trained)


class ChatEncoder:
    """Tokenizes samples in batches, which the tokenizer distributes over threads."""

    def __init__(self, tokenizer: FileTokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_control = np.zeros(tokenizer.vocab_size, dtype=bool)
        self._is_control[list(tokenizer.control_tokens.values())] = True

    def samples(
        self, samples: Iterable[tuple[ChatSample, Any]]
    ) -> Iterator[tuple[Tokens, Mask, Any]]:
        """Yield the tokens of each sample, their loss mask, and the label."""
        for batch in batched_by_size(samples, _size, _BATCH):
            encoded = self._tokenizer.encode_texts([sample.text for sample, _ in batch])
            for (sample, label), each in zip(batch, encoded, strict=True):
                yield each.tokens, self._flags(sample, each), label

    def texts(self, texts: Iterable[tuple[PlainText, Any]]) -> Iterator[tuple[Tokens, Mask, Any]]:
        """Yield the tokens of each text with its boundary tokens, their mask, and the label."""
        for batch in batched_by_size(texts, _size, _BATCH):
            cut = [text.text for text, _ in batch if _is_cut(text)]
            pairs = ((x.text, x.untrained) for x, _ in batch if not _is_cut(x))
            parts = [part for text, start in pairs for part in (text[:start], text[start:])]
            encoded = iter(self._tokenizer.encode_texts(cut) if cut else ())
            tokens = iter(self._tokenizer.encode_plain(parts))
            for text, label in batch:
                if _is_cut(text):
                    inner, trained = (each := next(encoded)).tokens, each.stops > text.untrained
                else:
                    masked, rest = next(tokens), next(tokens)
                    inner = np.concatenate([masked, rest])
                    trained = np.arange(len(inner)) >= len(masked)
                before, after = self._tokenizer.boundary_tokens(inner)
                flags = [np.zeros(len(before), bool), trained, np.ones(len(after), bool)]
                whole = [np.array(before, inner.dtype), inner, np.array(after, inner.dtype)]
                yield np.concatenate(whole), np.concatenate(flags), label

    def _flags(self, sample: ChatSample, encoded: EncodedText) -> Mask:
        """Return True for each token that has a character in a span, even if a span's edge cuts it.

        This is the behavior of transformers, with one exception: if several tokens share the last
        character, transformers marks only the first token. A control token whose text includes the
        whitespace after it is not trained on because of that whitespace, unless the template marks
        the whitespace.
        """
        spans = np.array([*sample.spans, (_FAR, _FAR)], dtype=np.int64)
        nearest = spans[np.searchsorted(spans[:, 1], encoded.starts, side="right"), 0]
        flags: Mask = nearest < encoded.stops
        if not sample.is_marked:
            flags &= ~(self._is_control[encoded.tokens] & (encoded.starts < nearest))
        return flags

    def ends(self, tokens: Tokens, flags: Mask) -> list[int]:
        """Return the control tokens that end spans of trained tokens."""
        last = flags & ~np.append(flags[1:], False)
        return [int(each) for each in tokens[last & self._is_control[tokens]]]


def _size(item: tuple[ChatSample | PlainText, Any]) -> int:
    return len(item[0].text)


def _is_cut(text: PlainText) -> bool:
    return text.untrained > 0 and not text.tokenized_apart
