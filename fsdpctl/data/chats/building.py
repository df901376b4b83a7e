"""Lines of conversations through templates and the tokenizer, into the parts of a data set."""

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fsdpctl.data.chats.cache import Kept, part_of
from fsdpctl.data.chats.child import Setup
from fsdpctl.data.chats.chosen import is_held_out, repeat_hash, repeats
from fsdpctl.data.chats.files import Source, lines_of
from fsdpctl.data.chats.rows import Chat, Line, Plain
from fsdpctl.data.chats.samples import Made, Sample
from fsdpctl.data.chats.tokens import ChatTokens, Encoder, Flags
from fsdpctl.data.chats.workers import Workers, workers
from fsdpctl.data.tokenizer import FileTokenizer, Tokens
from fsdpctl.errors import UsageError

OnRows = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is made of which files."""

    sources: tuple[Source, ...]
    val_sources: tuple[Source, ...]
    val_fraction: float  # of the sources, where there are no val_sources
    setup: Callable[[], tuple[Setup, str]]  # of the template, and what it is called
    on_rows: OnRows = lambda count: None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a row's samples go."""

    is_val: bool
    times: int


@dataclass(slots=True)
class _Part:
    tokens: list[Tokens] = field(default_factory=list)
    trained: list[Flags] = field(default_factory=list)

    def whole(self, dtype: type[np.unsignedinteger]) -> ChatTokens:
        lengths = [len(each) for each in self.tokens]
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
        tokens = np.concatenate([np.zeros(0, dtype), *self.tokens]).astype(dtype)
        return part_of(tokens, np.concatenate([np.zeros(0, bool), *self.trained]), starts)


class Building:
    """The samples of a data set while they are made."""

    def __init__(self, plan: Plan, tokenizer: FileTokenizer) -> None:
        """By a plan, with the tokenizer of the model."""
        self._plan, self._tokenizer = plan, tokenizer
        self._encoder = Encoder(tokenizer)
        self._parts = {is_val: _Part() for is_val in (False, True)}
        self._counts: Counter[str] = Counter()
        self._formats: list[str] = []
        self._ends: Counter[int] = Counter()
        self._workers: Workers | None = None

    def build(self) -> Kept:
        """Read everything.

        Raises:
            UsageError: a line cannot be trained on, or nothing is left to train on.
        """
        times = self._times()
        with ExitStack() as stack:
            for number, source in enumerate(self._plan.sources):
                self._add(source, stack, None if times is None else times[number], is_val=False)
            for source in self._plan.val_sources:
                self._add(source, stack, None, is_val=True)
        dtype = np.uint16 if self._tokenizer.vocab_size <= 1 << 16 else np.uint32
        train, val = (self._parts[is_val].whole(dtype) for is_val in (False, True))
        if not train.num_samples:
            dropped = self._counts["without_loss"]
            why = f"; {dropped} samples have no token with a loss" if dropped else ""
            raise UsageError(f"data.path: there is nothing to train on{why}")
        ends = [token for token, _ in self._ends.most_common(4)]
        held = val if val.num_samples else None
        return Kept(train, held, dict(self._counts), self._formats, ends)

    def _times(self) -> list[NDArray[np.int64]] | None:
        """How often each conversation is used, where files have shares: that takes their number."""
        shares = [each.share for each in self._plan.sources if each.share is not None]
        if not shares:
            return None
        hashes = []
        for source in self._plan.sources:
            found = [
                repeat_hash(content)
                for _, content in lines_of(source.path)[1]
                if not self._holds_out(content)
            ]
            hashes.append(np.array(found, dtype=np.uint64))
        return repeats(hashes, shares)

    def _holds_out(self, content: bytes) -> bool:
        if self._plan.val_sources:
            return False
        return is_held_out(content, self._plan.val_fraction)

    def _add(
        self, source: Source, stack: ExitStack, times: NDArray[np.int64] | None, *, is_val: bool
    ) -> None:
        name, lines = lines_of(source.path)
        self._formats.append(name)
        placed = self._placed(lines, source.path, times, is_val=is_val)
        first = next(placed, None)
        if first is None:
            return
        rows = _chained(first, placed)
        if isinstance(first[0].row, Plain):
            texts = ((line.row, place) for line, place in rows if isinstance(line.row, Plain))
            made = self._encoder.texts(texts)
        else:
            if self._workers is None:
                files = (*self._plan.sources, *self._plan.val_sources)
                size = sum(os.path.getsize(each.path) for each in files)
                self._workers = stack.enter_context(workers(*self._plan.setup(), size))
            made = self._encoder.samples(self._rendered(self._workers, rows))
        for tokens, trained, place in made:
            self._take(tokens, trained, place)

    def _placed(
        self,
        lines: Iterator[tuple[Line, bytes]],
        path: str,
        times: NDArray[np.int64] | None,
        *,
        is_val: bool,
    ) -> Iterator[tuple[Line, _Place]]:
        """Each line with the part that it goes to, without those that go nowhere."""
        number = 0
        for line, content in lines:
            self._plan.on_rows(1)
            held = is_val or self._holds_out(content)
            often = 1
            if times is not None and not held:
                if number >= len(times):
                    raise UsageError(f"{path}: changed while it was read")
                often = int(times[number])
                number += 1
            self._counts["val_chats" if held else "chats"] += often
            if often:
                yield line, _Place(held, often)

    def _rendered(
        self, found: Workers, rows: Iterator[tuple[Line, _Place]]
    ) -> Iterator[tuple[Sample, _Place]]:
        places: deque[_Place] = deque()

        def chats() -> Iterator[tuple[Chat, str]]:
            for line, place in rows:
                assert isinstance(line.row, Chat)
                places.append(place)
                yield line.row, line.where

        for made in found.results(chats()):
            place = places.popleft()
            self._count(made)
            for sample in made.samples:
                yield sample, place

    def _count(self, made: Made) -> None:
        self._counts.update(made.counts)
        self._counts["marked"] += any(each.is_marked for each in made.samples)
        self._counts["found"] += any(not each.is_marked for each in made.samples)

    def _take(self, tokens: Tokens, trained: Flags, place: _Place) -> None:
        if not trained[1:].any():  # the first token of a sample is nobody's target
            self._counts["without_loss"] += 1
            return
        self._ends.update(self._encoder.ends(tokens, trained))
        part = self._parts[place.is_val]
        part.tokens += [tokens] * place.times
        part.trained += [trained] * place.times


def _chained(
    first: tuple[Line, _Place], rest: Iterator[tuple[Line, _Place]]
) -> Iterator[tuple[Line, _Place]]:
    yield first
    yield from rest


def named_sources(sources: Sequence[Source]) -> str:
    """The files in words."""
    return ", ".join(
        each.path if each.share is None else f"{each.path} ({each.share:.0%})" for each in sources
    )
