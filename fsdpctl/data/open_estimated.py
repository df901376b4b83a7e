"""The data of an estimate: counted if it is small or in the cache, else estimated from places."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fsdpctl.chats.formats import COLUMN, Chat, ChatRow, PlainText
from fsdpctl.chats.partial_reads import ByteSpan, rows_in_spans
from fsdpctl.chats.rows import check_unambiguous
from fsdpctl.config.data import CHAT, TOKENS, DataConfig
from fsdpctl.config.data_files import DataFiles
from fsdpctl.config.data_sources import sources_in
from fsdpctl.data.chat_tokens import ChatSource, ChatTokenizer
from fsdpctl.data.data_set import DataSet
from fsdpctl.data.documents import SkippedInput, documents, last_char_start, text_problem
from fsdpctl.data.estimated import EstimatedData
from fsdpctl.data.find_data import HUB, find_data, is_cached
from fsdpctl.data.mixture import MixedSource, Mixture
from fsdpctl.data.open_chats import ChatSetup, has_cached_chats, open_chats
from fsdpctl.data.open_data import open_data
from fsdpctl.data.open_text import STDLIB, has_cached_text, open_text
from fsdpctl.data.packing import DocumentSet, Mask, Packing
from fsdpctl.data.streams import TokenStream
from fsdpctl.data.tokenizer import TextPiece, Tokenizer, Tokens
from fsdpctl.errors import UsageError, shorten_list
from fsdpctl.io.activity import doing
from fsdpctl.io.files import open_regular
from fsdpctl.io.stores import is_remote
from fsdpctl.io.untrusted import MIB

EXACT_BYTES = 64 * MIB  # of all files together, whose tokens are counted
NUM_EXCERPTS, EXCERPT_BYTES = 64, 1 << 15
_INNER = bytes(range(0x80, 0xC0))  # of characters, after their first byte


class _Excerpt(NamedTuple):
    """A part of a file, and the tokens of a run that it belongs to."""

    size: float  # bytes of the file
    part: float  # of the tokens
    samples: list[tuple[Tokens, Mask | None]]  # of a conversation, several


def open_estimated(config: DataConfig, seed: int = 0) -> DataSet:
    """Return the data of an estimate. Data that is `Estimated` can be counted, but not trained on.

    UsageError as `open_data`, or if the data is not on this machine.
    """
    for key, paths in (("data.path", config.path), ("data.val_path", config.val_path)):
        for path in [each.path for each in sources_in(paths, key)] if paths else ():
            if path.startswith(HUB) and not is_cached(path, key):
                raise UsageError(f"{key}={path}: not fetched; an estimate fetches no data")
            if config.name == TOKENS and is_remote(path, f"{key}={path}"):
                raise UsageError(f"{key}={path}: in a store; an estimate fetches no data")
    opening = _Opener()
    data = open_data(config, seed, opening.chats, opening.text)
    if not opening.estimates:
        return data
    # The longest conversation is unknown, also if those of some sources were counted.
    return replace(data, train=_estimated(data.train), val=data.val and _estimated(data.val))


def _estimated(corpus: Any) -> Any:
    if isinstance(corpus, Mixture):
        parts = (MixedSource(x.name, x.share, _estimated(x.content)) for x in corpus.sources)
        return Mixture(tuple(parts), corpus.purpose)
    is_sample = isinstance(corpus, EstimatedData)
    return corpus if is_sample else EstimatedData(corpus, corpus.num_tokens)


@dataclass(slots=True)
class _Opener:
    """Opens the sources of data, and counts the tokens of the first `left` bytes."""

    left: int = field(default_factory=lambda: EXACT_BYTES)
    estimates: bool = False  # whether a source had more

    def chats(self, rendering: ChatSetup, config: DataConfig, key: str) -> DataSet:
        return self._open((open_chats, has_cached_chats, _of_chats), rendering, config, key)

    def text(self, tokenizer: Tokenizer, config: DataConfig, key: str) -> DataSet:
        if config.name == STDLIB:
            return open_text(tokenizer, config, key)
        return self._open((open_text, has_cached_text, _of_text), tokenizer, config, key)

    def _open(
        self, ways: tuple[Callable[..., Any], ...], by: Any, config: DataConfig, key: str
    ) -> DataSet:
        read, is_counted, estimate = ways
        found = find_data(str(config.path), key, config.name, fetches=False)
        held = found.validation if config.uses_validation_files else ()
        files = DataFiles(found.option, found.train, held)
        val, size = _size(held), _size((*found.train, *held))
        most = max(self.left, NUM_EXCERPTS * EXCERPT_BYTES)  # which an estimate would read, too
        if (known := is_counted(by, config, files)) or size <= most:
            self.left -= 0 if known else size
            counted: DataSet = read(by, config, key, found)
            return counted
        self.estimates = True
        with doing("estimating tokens"):
            every = DataFiles(found.option, (*found.train, *held))
            data: EstimatedData = estimate(by, config, key, every)
        share = val / size if val else config.used_val_fraction
        kept, rest = (
            replace(data, num_tokens=round(data.num_tokens * x), scale=data.scale * x)
            for x in (1 - share, share)
        )
        tokenizer = by.tokenizer if isinstance(by, ChatSetup) else by
        count = float(f"{data.num_tokens:.4g}")
        tokens = f"{count:,.0f} tokens ±{2 * data.relative_error:.1%} in {size:,} bytes"
        return DataSet(
            kept, rest if share else None, tokenizer, tokenizer.vocab_size,
            f"{config.path}, {found.summary(validates=config.uses_validation_files)}",
            notes=(f"{tokens} (estimated from {NUM_EXCERPTS} places)",), has_val_files=bool(val),
        )  # fmt: skip


def _size(files: Sequence[Path]) -> int:
    return sum(each.stat().st_size for each in files)


def _of_text(tokenizer: Tokenizer, config: DataConfig, key: str, found: DataFiles) -> EstimatedData:
    next(
        documents(found, key, SkippedInput(), EXCERPT_BYTES), None
    )  # whose errors are those of a run
    pieces = list[_Excerpt]()

    def add(text: TextPiece, size: float, part: float = 1) -> None:
        tokens = [tokenizer.encode_pieces([text])] if text.text else []
        pieces.append(_Excerpt(size, part, [(each, None) for each in tokens]))

    for path, spans in _excerpt_spans(found.train).items():
        if found.option == CHAT:
            for line, size, share in rows_in_spans(str(path), spans, COLUMN):
                assert isinstance(line.content, PlainText)
                add(TextPiece(line.content.text, 0), size, share)
            continue
        with open(open_regular(path, follow_links=True), "rb", buffering=0) as file:
            end = path.stat().st_size
            for start, stop in spans:
                file.seek(start)
                part = file.read(stop - start)
                part = part.lstrip(_INNER) if start else part
                part = part if stop == end else part[: last_char_start(part)]
                text = "" if text_problem(part) else part.decode()  # training passes over the file
                add(TextPiece(text, 0, not start, stop == end), len(part))
    return _estimate(pieces, found, key)


def _of_chats(
    rendering: ChatSetup, config: DataConfig, key: str, found: DataFiles
) -> EstimatedData:
    for each in found.train if config.is_inferred else ():
        check_unambiguous(str(each))
    pieces, rows = list[_Excerpt](), list[tuple[ChatRow, _Excerpt]]()
    for path, spans in _excerpt_spans(found.train).items():
        for line, size, share in rows_in_spans(str(path), spans, config.prompt):
            pieces.append(_Excerpt(size, share, []))
            rows.append((line, pieces[-1]))
    plan = ChatSource(key, (), (), 0.0, config.prompt, rendering.template_setup)
    building = ChatTokenizer(plan, rendering.tokenizer)
    for kind in (PlainText, Chat):
        made = building.samples(row for row in rows if isinstance(row[0].content, kind))
        for tokens, trained, piece in made:
            if trained[1:].any():  # else training drops the sample
                piece.samples.append((tokens, trained))
    packing = Packing(config.packing is not False, config.too_long, rendering.seed)
    return _estimate(pieces, found, key, packing)


def _estimate(
    pieces: list[_Excerpt], found: DataFiles, key: str, packing: Packing | None = None
) -> EstimatedData:
    samples = [x for each in pieces for x in each.samples]
    if not samples:
        where = shorten_list([*map(str, found.train)])
        raise UsageError(f"{key}: {where}: nothing to train on at {NUM_EXCERPTS} places")
    places = np.arange(len(pieces)) * NUM_EXCERPTS // len(pieces)
    read = np.bincount(places, [each.size for each in pieces])
    lengths = [each.part * sum(len(x) for x, _ in each.samples) for each in pieces]
    counts, size = np.bincount(places, lengths), _size(found.train)
    rate, left = counts.sum() / read.sum(), max(0, 1 - read.sum() / size)
    # By the residuals of a ratio; bytes that are read have none.
    spread = float(np.linalg.norm(counts - rate * read) * left**0.5 / counts.sum())
    tokens = np.concatenate([x for x, _ in samples])
    parts = [each.part for each in pieces for _ in each.samples]
    about = round(rate * size), float(size / read.sum()), parts, spread
    if packing is None:
        return EstimatedData(TokenStream(tokens, None), *about)
    starts = np.cumsum([0, *(len(x) for x, _ in samples)], dtype=np.int64)
    trained = np.concatenate([x for _, x in samples if x is not None])
    return EstimatedData(DocumentSet(tokens, trained, starts, packing), *about)


def _excerpt_spans(files: Sequence[Path]) -> dict[Path, list[ByteSpan]]:
    sizes = [each.stat().st_size for each in files]
    ends, spans = [*accumulate(sizes)], defaultdict[Path, list[ByteSpan]](list)
    size = min(EXCERPT_BYTES, -(-ends[-1] // NUM_EXCERPTS))
    for place in range(NUM_EXCERPTS):
        at = max(0, ends[-1] * (2 * place + 1) // (2 * NUM_EXCERPTS) - size // 2)
        stop = min(at + size, ends[-1])
        while at < stop:
            number = bisect_right(ends, at)
            begin, end = ends[number] - sizes[number], min(stop, ends[number])
            spans[files[number]].append((at - begin, end - begin))
            at = end
    return spans
