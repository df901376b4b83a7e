"""The data of an estimate: counted if it is small or in the cache, else estimated from places."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from fsdpctl.chats.formats import COLUMN, Chat, ChatLine, Plain
from fsdpctl.chats.lines import check_is_clear
from fsdpctl.chats.places import Span, lines_near
from fsdpctl.config.data import CHAT, TOKENS, DataConfig
from fsdpctl.config.data_files import DataFiles
from fsdpctl.config.sources import sources_in
from fsdpctl.data.chat_tokens import Building, BuildPlan
from fsdpctl.data.data_set import DataSet
from fsdpctl.data.documents import PassedOver, character_end, documents, problem_in
from fsdpctl.data.estimated import Estimated
from fsdpctl.data.find_data import HUB, find_data, is_fetched
from fsdpctl.data.mixture import MixedSource, Mixture
from fsdpctl.data.open_chats import Rendering, has_read_chats, open_chats
from fsdpctl.data.open_data import open_data
from fsdpctl.data.open_text import OWN, has_read_text, open_text
from fsdpctl.data.packing import DocumentSet, Flags, Packing
from fsdpctl.data.streams import TokenStream
from fsdpctl.data.tokenizer import TextPiece, Tokenizer, Tokens
from fsdpctl.errors import UsageError
from fsdpctl.io.activity import doing
from fsdpctl.io.files import open_regular
from fsdpctl.io.stores import is_remote
from fsdpctl.io.untrusted import MIB

EXACT_BYTES = 64 * MIB  # of all files together, whose tokens are counted
PLACES, PLACE_BYTES = 64, 1 << 16
_INNER = bytes(range(0x80, 0xC0))  # of characters, after their first byte
# Pieces of files: the bytes of each, and its tokens in a run, of a conversation in several samples.
_Pieces = list[tuple[float, list[tuple[Tokens, Flags | None]]]]


def open_estimated(config: DataConfig, seed: int = 0) -> DataSet:
    """Return the data of an estimate. Data that is `Estimated` can be counted, but not trained on.

    UsageError as `open_data`, or if the data is not on this machine.
    """
    for key, paths in (("data.path", config.path), ("data.val_path", config.val_path)):
        for path in [each.path for each in sources_in(paths, key)] if paths else ():
            if path.startswith(HUB) and not is_fetched(path, key):
                raise UsageError(f"{key}={path}: not fetched; an estimate fetches no data")
            if config.name == TOKENS and is_remote(path, f"{key}={path}"):
                raise UsageError(f"{key}={path}: in a store; an estimate fetches no data")
    opening = _Opening()
    data = open_data(config, seed, opening.chats, opening.text)
    if not opening.estimates:
        return data
    # The longest conversation is unknown, also if those of some sources were counted.
    return replace(data, train=_estimated(data.train), val=data.val and _estimated(data.val))


def _estimated(corpus: Any) -> Any:
    if isinstance(corpus, Mixture):
        parts = (MixedSource(x.name, x.share, _estimated(x.content)) for x in corpus.parts)
        return Mixture(tuple(parts), corpus.purpose)
    return corpus if isinstance(corpus, Estimated) else Estimated(corpus)


@dataclass(slots=True)
class _Opening:
    """Opens the sources of data, and counts the tokens of the first `left` bytes."""

    left: int = field(default_factory=lambda: EXACT_BYTES)
    estimates: bool = False  # whether a source had more

    def chats(self, rendering: Rendering, config: DataConfig, key: str) -> DataSet:
        return self._open((open_chats, has_read_chats, _of_chats), rendering, config, key)

    def text(self, tokenizer: Tokenizer, config: DataConfig, key: str) -> DataSet:
        if config.name == OWN:
            return open_text(tokenizer, config, key)
        return self._open((open_text, has_read_text, _of_text), tokenizer, config, key)

    def _open(
        self, ways: tuple[Callable[..., Any], ...], by: Any, config: DataConfig, key: str
    ) -> DataSet:
        read, is_counted, estimate = ways
        found = find_data(str(config.path), key, config.name, fetches=False)
        held = found.validation if config.takes_validation else ()
        files = DataFiles(found.option, found.train, held)
        val, size = _size(held), _size((*found.train, *held))
        most = max(self.left, PLACES * PLACE_BYTES)  # which an estimate would read, too
        if (known := is_counted(by, config, files)) or size <= most:
            self.left -= 0 if known else size
            counted: DataSet = read(by, config, key, found)
            return counted
        self.estimates = True
        with doing("estimating tokens"):
            every = DataFiles(found.option, (*found.train, *held))
            data: Estimated = estimate(by, config, key, every)
        share = val / size if val else config.held_out
        part = partial(Estimated, data.sample, spread=data.spread)
        tokenizer = by.tokenizer if isinstance(by, Rendering) else by
        count = float(f"{data.num_tokens:.4g}")
        tokens = f"{count:,.0f} tokens ±{2 * data.spread:.1%} in {size:,} bytes"
        kept, rest = part(data.scale * (1 - share)), part(data.scale * share)
        return DataSet(
            kept, rest if share else None, tokenizer, tokenizer.vocab_size,
            f"{config.path}, {found.about(validates=config.takes_validation)}",
            notes=(f"{tokens} (estimated from {PLACES} places)",), has_val_files=bool(val),
        )  # fmt: skip


def _size(files: Sequence[Path]) -> int:
    return sum(each.stat().st_size for each in files)


def _of_text(tokenizer: Tokenizer, config: DataConfig, key: str, found: DataFiles) -> Estimated:
    next(documents(found, key, PassedOver(), PLACE_BYTES), None)  # whose errors are those of a run
    pieces = _Pieces()

    def add(size: float, *texts: TextPiece) -> None:
        pieces.append((size, [(tokenizer.encode_pieces([each]), None) for each in texts]))

    for path, spans in _spans_of(found.train).items():
        if found.option == CHAT:
            for line, share in lines_near(str(path), spans, COLUMN):
                assert isinstance(line.content, Plain)
                add(share, TextPiece(line.content.text, 0))
            continue
        with open(open_regular(path, follows=True), "rb", buffering=0) as file:
            size = path.stat().st_size
            for start, stop in spans:
                file.seek(start)
                part = file.read(stop - start)
                part = part.lstrip(_INNER) if start else part
                part = part if stop == size else part[: character_end(part)]
                if part and not problem_in(part):
                    add(len(part), TextPiece(part.decode(), 0, not start, stop == size))
                else:  # training passes over the file
                    add(len(part))
    return _estimate(pieces, found, key)


def _of_chats(rendering: Rendering, config: DataConfig, key: str, found: DataFiles) -> Estimated:
    for each in found.train if config.is_inferred else ():
        check_is_clear(str(each))
    pieces, rows = _Pieces(), list[tuple[ChatLine, int]]()
    for path, spans in _spans_of(found.train).items():
        for line, share in lines_near(str(path), spans, config.prompt):
            rows.append((line, len(pieces)))
            pieces.append((share, []))
    plan = BuildPlan(key, (), (), 0.0, config.prompt, rendering.setup)
    building = Building(plan, rendering.tokenizer)
    for kind in (Plain, Chat):
        made = building.samples(row for row in rows if isinstance(row[0].content, kind))
        for tokens, trained, number in made:
            if trained[1:].any():  # else training drops the sample
                pieces[number][1].append((tokens, trained))
    packing = Packing(config.packing is not False, config.too_long, rendering.seed)
    return _estimate(pieces, found, key, packing)


def _estimate(
    pieces: _Pieces, found: DataFiles, key: str, packing: Packing | None = None
) -> Estimated:
    """Return the tokens of all files; UsageError if the pieces have none."""
    samples = [sample for _, of_piece in pieces for sample in of_piece]
    if not samples:
        raise UsageError(f"{key}: nothing to train on at {PLACES} places of {found.train[0]}, …")
    places = np.arange(len(pieces)) * PLACES // len(pieces)
    read = np.bincount(places, [size for size, _ in pieces])
    counts = np.bincount(places, [sum(len(x) for x, _ in of_piece) for _, of_piece in pieces])
    scale, rate = float(_size(found.train) / read.sum()), counts.sum() / read.sum()
    # The residuals of a ratio; what is read has none
    off = float(np.linalg.norm(counts - rate * read)) * max(0, 1 - 1 / scale) ** 0.5
    tokens = np.concatenate([x for x, _ in samples])
    if packing is None:
        return Estimated(TokenStream(tokens, None), scale, off / len(tokens))
    starts = np.cumsum([0, *(len(x) for x, _ in samples)], dtype=np.int64)
    trained = np.concatenate([x for _, x in samples if x is not None])
    chats = DocumentSet(tokens, trained, starts, packing)
    return Estimated(chats, scale, off / len(tokens))


def _spans_of(files: Sequence[Path]) -> dict[Path, list[Span]]:
    """Return files with evenly spread parts of each."""
    sizes = [each.stat().st_size for each in files]
    ends, spans = [*accumulate(sizes)], defaultdict[Path, list[Span]](list)
    size = min(PLACE_BYTES, -(-ends[-1] // PLACES))
    for place in range(PLACES):
        at = max(0, ends[-1] * (2 * place + 1) // (2 * PLACES) - size // 2)
        stop = min(at + size, ends[-1])
        while at < stop:
            number = bisect_right(ends, at)
            begin, end = ends[number] - sizes[number], min(stop, ends[number])
            spans[files[number]].append((at - begin, end - begin))
            at = end
    return spans
