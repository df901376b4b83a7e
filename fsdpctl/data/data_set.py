"""The data of a run, of one source or of several."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdpctl.config.data_sources import DataSource
from fsdpctl.data.estimated import EstimatedData
from fsdpctl.data.mixture import PERIOD, MixedSource, Mixture
from fsdpctl.data.packing import DocumentSet
from fsdpctl.data.script_data import ScriptData
from fsdpctl.data.streams import TokenStream
from fsdpctl.data.token_formats import TokenFile
from fsdpctl.data.tokenizer import Tokenizer
from fsdpctl.errors import UsageError

Content = TokenStream | DocumentSet | ScriptData | EstimatedData
Corpus = Content | Mixture


def contents_of(corpus: Corpus) -> tuple[Content, ...]:
    """Return the contents of the sources of a mixture, or that of one source."""
    return tuple(x.content for x in corpus.sources) if isinstance(corpus, Mixture) else (corpus,)


@dataclass(frozen=True, slots=True)
class DataSet:
    """The data that a run trains and validates on."""

    train: Corpus
    val: Corpus | None
    tokenizer: Tokenizer
    vocab_size: int  # 0: unknown
    description: str
    token_files: tuple[TokenFile, ...] = ()  # that the data is read from
    notes: tuple[str, ...] = ()  # lines about the data
    format_notes: tuple[str, ...] = ()  # those notes that tell what the files of chats mean
    date: str | None = None  # that chats were rendered with, if the template writes it
    template: str | None = None  # of chats, if it isn't that of the tokenizer
    end_tokens: tuple[int, ...] = ()  # that end a trained assistant message, most frequent first
    prompt: tuple[int, ...] = ()  # to generate a sample from
    files: tuple[Path, ...] = ()  # of text or rows that the data is read from
    has_val_files: bool = False  # whether `val` has files of its own, and is not held out

    @property
    def has_text(self) -> bool:
        """Whether the tokenizer of its tokens is known."""
        return self.tokenizer.vocab_size == self.vocab_size

    @property
    def relative_error(self) -> float | None:
        """The standard error of the tokens to train on, of one; None if they are counted."""
        parts = [each for each in contents_of(self.train) if isinstance(each, EstimatedData)]
        total = math.hypot(*(x.relative_error * x.num_tokens for x in parts))
        return total / self.train.num_tokens if parts else None

    @property
    def fingerprint(self) -> str:
        return self.train.fingerprint + (self.val.fingerprint if self.val else "")


def mix(sources: Sequence[DataSource], found: Sequence[DataSet], key: str) -> DataSet:
    """Return the data of several sources; without shares, each has that of its tokens.

    UsageError if two have one name, or are of other tokenizers.
    """
    first, names = found[0], [each.name for each in sources]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"{key}: two sources are called {twice[0]}; write NAME=PATH:SHARE")
    for source, other in zip(sources, found, strict=True):
        check_same_tokenizer(sources[0].path, first, source.path, other)
    total = sum(each.train.num_tokens for each in found)
    pairs = zip(sources, found, strict=True)
    shares = [y.train.num_tokens / total if x.share is None else x.share for x, y in pairs]
    if least := next((n for n, x in zip(names, shares, strict=True) if x * PERIOD < 0.5), None):
        way = "give it a larger one, or join it with another source"
        raise UsageError(f"{key}: {least}: its share is less than one of {PERIOD:,} samples; {way}")

    def part(name: str) -> tuple[MixedSource, ...]:
        streams = [getattr(each, name) for each in found]
        about = zip(sources, shares, streams, strict=True)
        return tuple(MixedSource(s.name, share, each) for s, share, each in about if each)

    val = part("val")
    return DataSet(
        Mixture(part("train"), "" if key == "data.path" else f" ({key})"),
        Mixture(val, " (data.val_fraction)") if val else None,
        first.tokenizer,
        first.vocab_size,
        ", ".join(f"{n} ({x:.1%})" for n, x in zip(names, shares, strict=True)),
        prompt=first.prompt,
        files=tuple(file for each in found for file in each.files),
        token_files=tuple(file for each in found for file in each.token_files),
        notes=(*_on_weights([each.weight or 0 for each in sources]), *_notes(names, found)),
        format_notes=tuple(note for each in found for note in each.format_notes),
        date=next((each.date for each in found if each.date), None),
        template=next((each.template for each in found if each.template), None),
        end_tokens=tuple(dict.fromkeys(end for each in found for end in each.end_tokens)),
        has_val_files=any(each.has_val_files for each in found),
    )


def _on_weights(weights: Sequence[float]) -> Iterator[str]:
    """Yield a line about shares that look like parts of one, but are not: numbers of any sum do."""
    total = sum(weights)
    if 0 < max(weights) < 1 and not math.isclose(total, 1, abs_tol=1e-2):
        given = ", ".join(f"{each:g}" for each in weights)
        yield f"shares {given} add up to {total:g} and are scaled to a sum of 1"


def _notes(names: Sequence[str], found: Sequence[DataSet]) -> tuple[str, ...]:
    said = Counter(note for each in found for note in each.notes)
    about = list(zip(names, found, strict=True))
    lines = (
        note if said[note] == len(found) else f"{name}: {note}"
        for name, each in about
        for note in each.notes
    )
    return (*(f"{name}: {each.description}" for name, each in about), *dict.fromkeys(lines))


def check_same_tokenizer(path: str, one: DataSet, other_path: str, other: DataSet) -> None:
    alike = other.tokenizer.checksum == one.tokenizer.checksum
    if not alike or other.vocab_size != one.vocab_size:
        raise UsageError(
            f"{other_path}: tokens of {other.tokenizer.name}, {other.vocab_size:,} different ones, "
            f"unlike those of {path}: of {one.tokenizer.name}, {one.vocab_size:,}"
        )
