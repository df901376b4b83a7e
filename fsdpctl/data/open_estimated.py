"""The data of an estimate: counted if it is small or in the cache, else estimated from excerpts."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fsdpctl.chats.formats import TEXT_COLUMN, Chat, ChatRow, PlainText
from fsdpctl.chats.partial_reads import ByteSpan, rows_in_spans
from fsdpctl.chats.rows import check_unambiguous
from fsdpctl.config.data import CHAT, TOKENS, DataConfig
from fsdpctl.config.data_files import DataFiles
from fsdpctl.config.data_sources import sources_in
from fsdpctl.data.chat_tokens import ChatDataBuilder, ChatSource
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
from fsdpctl.io.texts import MIB

EXACT_BYTES = 64 * MIB  # up to this size of all files together, tokens are counted
NUM_EXCERPTS, EXCERPT_BYTES = 64, 1 << 15
_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # UTF-8, after a character's first byte


class _SampledPart(NamedTuple):
    """A row or a part of a text file in an excerpt, and the samples that overlap it."""

    size: float  # bytes of the file
    fraction: float  # the part of the samples' tokens that is in the excerpt
    samples: list[tuple[Tokens, Mask | None]]  # a conversation can become several samples


def open_estimated(config: DataConfig, seed: int = 0) -> DataSet:
    """Open the data of an estimate. Parts that are `EstimatedData` can't be trained on.

    UsageError as in `open_data`, or if the data is not on this machine.
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
    # The longest conversation is unknown even if other sources were counted, so all are estimated.
    return replace(data, train=_estimated(data.train), val=data.val and _estimated(data.val))


def _estimated(corpus: Any) -> Any:
    if isinstance(corpus, Mixture):
        parts = (MixedSource(x.name, x.share, _estimated(x.content)) for x in corpus.sources)
        return Mixture(tuple(parts), corpus.suffix)
    is_estimated = isinstance(corpus, EstimatedData)
    return corpus if is_estimated else EstimatedData(corpus, corpus.num_tokens)


@dataclass(slots=True)
class _Opener:
    """Opens sources of data: counts the tokens of up to `left` bytes, and estimates the rest."""

    left: int = field(default_factory=lambda: EXACT_BYTES)  # read late: tests change it
    estimates: bool = False  # whether a source was estimated

    def chats(self, setup: ChatSetup, config: DataConfig, key: str) -> DataSet:
        return self._open((open_chats, has_cached_chats, _of_chats), setup, config, key)

    def text(self, tokenizer: Tokenizer, config: DataConfig, key: str) -> DataSet:
        if config.name == STDLIB:
            return open_text(tokenizer, config, key)
        return self._open((open_text, has_cached_text, _of_text), tokenizer, config, key)

    def _open(
        self, functions: tuple[Callable[..., Any], ...], setup: Any, config: DataConfig, key: str
    ) -> DataSet:
        """Open a source with `functions`; `setup` is their ChatSetup or Tokenizer."""
        read, is_counted, estimate = functions
        data_files = find_data(str(config.path), key, config.name, fetches=False)
        val_files = data_files.validation if config.uses_validation_files else ()
        files = DataFiles(data_files.kind, data_files.files, val_files)
        val_size, size = _size(val_files), _size((*data_files.files, *val_files))
        # An estimate would read the bytes of all excerpts, too.
        limit = max(self.left, NUM_EXCERPTS * EXCERPT_BYTES)
        if (has_count := is_counted(setup, config, files)) or size <= limit:
            self.left -= 0 if has_count else size
            counted: DataSet = read(setup, config, key, data_files)
            return counted
        self.estimates = True
        with doing("estimating tokens"):
            all_files = DataFiles(data_files.kind, (*data_files.files, *val_files))
            data: EstimatedData = estimate(setup, config, key, all_files)
        share = val_size / size if val_size else config.used_val_fraction
        train, held_out = (
            replace(data, num_tokens=round(data.num_tokens * x), scale=data.scale * x)
            for x in (1 - share, share)
        )
        tokenizer = setup.tokenizer if isinstance(setup, ChatSetup) else setup
        count = float(f"{data.num_tokens:.4g}")
        tokens = f"{count:,.0f} tokens ±{2 * data.relative_error:.1%} in {size:,} bytes"
        return DataSet(
            train, held_out if share else None, tokenizer, tokenizer.vocab_size,
            f"{config.path}, {data_files.summary(validates=config.uses_validation_files)}",
            notes=(f"{tokens} (estimated from {NUM_EXCERPTS} excerpts)",),
            has_val_files=bool(val_size),
        )  # fmt: skip


def _size(files: Sequence[Path]) -> int:
    return sum(each.stat().st_size for each in files)


def _of_text(tokenizer: Tokenizer, config: DataConfig, key: str, files: DataFiles) -> EstimatedData:
    # Raise the errors that a run would raise for the first document.
    next(documents(files, key, SkippedInput(), EXCERPT_BYTES), None)
    parts = list[_SampledPart]()

    def add(text: TextPiece, size: float, fraction: float = 1) -> None:
        samples: Any = [(tokenizer.encode_pieces([text]), None)] if text.text else []
        parts.append(_SampledPart(size, fraction, samples))

    for path, spans in _excerpt_spans(files.files).items():
        if files.kind == CHAT:
            for row, size, fraction in rows_in_spans(str(path), spans, TEXT_COLUMN):
                assert isinstance(row.content, PlainText)
                add(TextPiece(row.content.text, size=0), size, fraction)
            continue
        with open(open_regular(path, follow_links=True), "rb", buffering=0) as file:
            end = path.stat().st_size
            for start, stop in spans:
                file.seek(start)
                content = file.read(stop - start)
                content = content.lstrip(_CONTINUATION_BYTES) if start else content
                content = content if stop == end else content[: last_char_start(content)]
                # Training skips a file that isn't text.
                text = "" if text_problem(content) else content.decode()
                add(TextPiece(text, size=0, begins=not start, ends=stop == end), len(content))
    return _estimate(parts, files, key)


def _of_chats(setup: ChatSetup, config: DataConfig, key: str, files: DataFiles) -> EstimatedData:
    for each in files.files if config.is_inferred else ():
        check_unambiguous(str(each))
    rows = list[tuple[ChatRow, _SampledPart]]()
    for path, spans in _excerpt_spans(files.files).items():
        for row, size, fraction in rows_in_spans(str(path), spans, config.prompt):
            rows.append((row, _SampledPart(size, fraction, [])))
    source = ChatSource(key, (), (), 0.0, config.prompt, setup.template_setup)
    builder = ChatDataBuilder(source, setup.tokenizer)
    for kind in (PlainText, Chat):
        samples = builder.samples(row for row in rows if isinstance(row[0].content, kind))
        for tokens, loss_mask, part in samples:
            # Training drops a sample without a target.
            if loss_mask[1:].any():
                part.samples.append((tokens, loss_mask))
    packing = Packing(config.packing is not False, config.too_long, setup.seed)
    return _estimate([part for _, part in rows], files, key, packing)


def _estimate(
    parts: list[_SampledPart], files: DataFiles, key: str, packing: Packing | None = None
) -> EstimatedData:
    samples = [x for each in parts for x in each.samples]
    if not samples:
        location = shorten_list([*map(str, files.files)])
        raise UsageError(f"{key}: {location}: nothing to train on in {NUM_EXCERPTS} excerpts")
    # The parts are in order, so they are divided evenly into excerpts.
    excerpt_of = np.arange(len(parts)) * NUM_EXCERPTS // len(parts)
    num_bytes = np.bincount(excerpt_of, [each.size for each in parts])
    lengths = [each.fraction * sum(len(x) for x, _ in each.samples) for each in parts]
    counts, size = np.bincount(excerpt_of, lengths), _size(files.files)
    rate, unread = counts.sum() / num_bytes.sum(), max(0, 1 - num_bytes.sum() / size)
    # The relative standard error of a ratio estimator, from its residuals; read bytes have none.
    error = float(np.linalg.norm(counts - rate * num_bytes) * unread**0.5 / counts.sum())
    tokens = np.concatenate([x for x, _ in samples])
    fractions = [each.fraction for each in parts for _ in each.samples]
    figures = round(rate * size), float(size / num_bytes.sum()), fractions, error
    if packing is None:
        return EstimatedData(TokenStream(tokens, num_bytes=None), *figures)
    starts = np.cumsum([0, *(len(x) for x, _ in samples)], dtype=np.int64)
    loss_mask = np.concatenate([x for _, x in samples if x is not None])
    return EstimatedData(DocumentSet(tokens, loss_mask, starts, packing), *figures)


def _excerpt_spans(files: Sequence[Path]) -> dict[Path, list[ByteSpan]]:
    """Return NUM_EXCERPTS spans, evenly spaced in the concatenated files, by file."""
    sizes = [each.stat().st_size for each in files]
    ends, spans = [*accumulate(sizes)], defaultdict[Path, list[ByteSpan]](list)
    size = min(EXCERPT_BYTES, -(-ends[-1] // NUM_EXCERPTS))
    for index in range(NUM_EXCERPTS):
        start = max(0, ends[-1] * (2 * index + 1) // (2 * NUM_EXCERPTS) - size // 2)
        stop = min(start + size, ends[-1])
        while start < stop:
            file_index = bisect_right(ends, start)
            file_start, end = ends[file_index] - sizes[file_index], min(stop, ends[file_index])
            spans[files[file_index]].append((start - file_start, end - file_start))
            start = end
    return spans
