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
from fsdpctl.data.mixture import Mixture
from fsdpctl.data.open_chats import Rendering, has_read_chats, open_chats
from fsdpctl.data.open_data import Readers, open_data
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
    data = open_data(config, seed, Readers(opening.chats, opening.text))
    if not opening.estimates:
        return data
    # The longest conversation is unknown, also if those of some sources were counted.
    return replace(data, train=_estimated(data.train), val=data.val and _estimated(data.val))


def _estimated(corpus: Any) -> Any:
    if isinstance(corpus, Mixture):
        parts = (replace(each, content=_estimated(each.content)) for each in corpus.parts)
        return replace(corpus, parts=tuple(parts))
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
        self,
        functions: tuple[Callable[..., DataSet], Callable[..., bool], Callable[..., Estimated]],
        by: Any,
        config: DataConfig,
        key: str,
    ) -> DataSet:
        count, is_counted, estimate = functions
        found = find_data(str(config.path), key, config.name, fetches=False)
        held = found.validation if config.takes_validation else ()
        files = DataFiles(found.option, found.train, held)
        size, held_out = _size(files.train), _size(held)
        most = max(self.left, PLACES * PLACE_BYTES)  # which an estimate would read, too
        if (known := is_counted(by, config, files)) or size + held_out <= most:
            self.left -= 0 if known else size + held_out
            return count(by, config, key, found)
        self.estimates = True
        with doing("estimating tokens"):
            data = estimate(by, config, key, files)
        share = held_out / size if held_out else config.held_out
        part = partial(Estimated, data.sample, spread=data.spread)
        tokenizer = by.tokenizer if isinstance(by, Rendering) else by
        about = f"{data.num_tokens:,} tokens ±{2 * data.spread:.1%} in {size:,} bytes"
        return DataSet(
            part(data.scale * (1 if held_out else 1 - share)),
            part(data.scale * share) if share else None,
            tokenizer,
            tokenizer.vocab_size,
            f"{config.path}, {found.about(validates=config.takes_validation)}",
            notes=(f"{about} (estimated from {PLACES} places)",),
            files=(*files.train, *files.validation),
            has_val_files=bool(held_out),
        )


def _size(files: Sequence[Path]) -> int:
    return sum(each.stat().st_size for each in files)


@dataclass(slots=True)
class _Sample:
    """The tokens of pieces of files."""

    sizes: list[float] = field(default_factory=list)  # bytes of each piece
    found: list[tuple[int, Tokens, Flags]] = field(default_factory=list)  # number of the piece

    def add(self, size: float, tokens: Tokens | None) -> None:
        if tokens is not None:
            self.found.append((len(self.sizes), tokens, np.ones(len(tokens), bool)))
        self.sizes.append(size)

    def estimate(self, key: str, files: Sequence[Path], packing: Packing | None) -> Estimated:
        """Return the tokens of all files; UsageError if the sample has none."""
        if not self.found:
            raise UsageError(
                f"{key}: nothing to train on at {PLACES} places, such as in {files[0]}"
            )
        numbers, tokens, trained = zip(*self.found, strict=True)
        lengths = [*map(len, tokens)]
        places = np.arange(len(self.sizes)) * PLACES // len(self.sizes)
        counts = np.bincount(places, np.bincount(numbers, lengths, len(places)))
        read = np.bincount(places, self.sizes)
        scale, rate = _size(files) / read.sum(), counts.sum() / read.sum()
        # The residuals of a ratio, and less of them if much is read
        off = np.linalg.norm(counts - rate * read) * max(0, 1 - 1 / scale) ** 0.5
        sample: Any = TokenStream(np.concatenate(tokens), None)
        if packing:
            starts = np.cumsum([0, *lengths], dtype=np.int64)
            sample = DocumentSet(sample.tokens, np.concatenate(trained), starts, packing)
        return Estimated(sample, float(scale), float(off / counts.sum()))


def _of_text(tokenizer: Tokenizer, config: DataConfig, key: str, found: DataFiles) -> Estimated:
    next(documents(found, key, PassedOver(), PLACE_BYTES), None)  # whose errors are those of a run
    sample = _Sample()
    for number, spans in _spans_of(found.train).items():
        path, size = found.train[number], found.train[number].stat().st_size
        if found.option == CHAT:
            for line, share in lines_near(str(path), spans, COLUMN):
                assert isinstance(line.content, Plain)
                piece = TextPiece(line.content.text, 0)
                sample.add(share, tokenizer.encode_pieces([piece]))
            continue
        with open(open_regular(path, follows=True), "rb", buffering=0) as file:
            for start, stop in spans:
                file.seek(start)
                part = file.read(stop - start)
                begin = len(part) - len(part.lstrip(_INNER)) if start else 0
                part = part[begin : len(part) if stop == size else character_end(part)]
                piece = TextPiece(part.decode("utf-8", "replace"), 0, not start, stop == size)
                is_text = part and not problem_in(part)  # else training passes over the file
                sample.add(len(part), tokenizer.encode_pieces([piece]) if is_text else None)
    return sample.estimate(key, found.train, None)


def _of_chats(rendering: Rendering, config: DataConfig, key: str, found: DataFiles) -> Estimated:
    for each in found.train if config.is_inferred else ():
        check_is_clear(str(each))
    packing = Packing(config.packing is not False, config.too_long, rendering.seed)
    sample, rows = _Sample(), list[tuple[ChatLine, int]]()
    for number, spans in _spans_of(found.train).items():
        for line, share in lines_near(str(found.train[number]), spans, config.prompt):
            rows.append((line, len(rows)))
            sample.sizes.append(share)
    building = Building(
        BuildPlan(key, (), (), 0.0, config.prompt, rendering.setup), rendering.tokenizer
    )
    for kind in (Plain, Chat):
        made = building.samples(row for row in rows if isinstance(row[0].content, kind))
        sample.found += [(n, tokens, flags) for tokens, flags, n in made if flags[1:].any()]
    return sample.estimate(key, found.train, packing)


def _spans_of(files: Sequence[Path]) -> dict[int, list[Span]]:
    """Return evenly spread parts of files, by the number of the file."""
    sizes = [each.stat().st_size for each in files]
    ends, spans = [*accumulate(sizes)], defaultdict[int, list[Span]](list)
    each = ends[-1] // PLACES
    for middle in range(each // 2, ends[-1], each):
        at, stop = middle - min(each, PLACE_BYTES) // 2, middle + min(each, PLACE_BYTES) // 2
        while at < stop:
            number = bisect_right(ends, at)
            begin, end = ends[number] - sizes[number], min(stop, ends[number])
            spans[number].append((at - begin, end - begin))
            at = end
    return spans
