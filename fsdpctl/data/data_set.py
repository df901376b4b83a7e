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
    """Return the content of each source: several of a mixture, otherwise one."""
    return tuple(x.content for x in corpus.sources) if isinstance(corpus, Mixture) else (corpus,)


@dataclass(frozen=True, slots=True)
class DataSet:
    """The data that a run trains and validates on."""

    train: Corpus
    val: Corpus | None
    tokenizer: Tokenizer
    vocab_size: int  # 0: unknown
    description: str
    token_files: tuple[TokenFile, ...] = ()
    notes: tuple[str, ...] = ()  # lines about the data
    format_notes: tuple[str, ...] = ()  # the notes that explain how rows of chats were read
    date: str | None = None  # rendered into chats, if the template writes the date
    template: str | None = None  # the chat template, unless it is the tokenizer's
    end_tokens: tuple[int, ...] = ()  # tokens that end trained assistant messages, by frequency
    generation_prompt: tuple[int, ...] = ()  # tokens to generate a text from
    files: tuple[Path, ...] = ()  # text or rows, not token files
    has_val_files: bool = False  # whether `val` was read from files, rather than held out

    @property
    def has_text(self) -> bool:
        """Whether `tokenizer` can decode the tokens."""
        return self.tokenizer.vocab_size == self.vocab_size

    @property
    def relative_error(self) -> float | None:
        """The relative standard error of `train.num_tokens`; None if the tokens were counted."""
        parts = [each for each in contents_of(self.train) if isinstance(each, EstimatedData)]
        total = math.hypot(*(x.relative_error * x.num_tokens for x in parts))
        return total / self.train.num_tokens if parts else None

    @property
    def fingerprint(self) -> str:
        return self.train.fingerprint + (self.val.fingerprint if self.val else "")


def mix(sources: Sequence[DataSource], data_sets: Sequence[DataSet], key: str) -> DataSet:
    """Return the mixture of several sources. A source without a share gets its part of all tokens.

    UsageError if two sources have the same name or different tokenizers.
    """
    first, names = data_sets[0], [each.name for each in sources]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"{key}: two sources are called {repeated[0]}; write NAME=PATH:SHARE")
    for source, other in zip(sources, data_sets, strict=True):
        check_same_tokenizer(sources[0].path, first, source.path, other)
    total = sum(each.train.num_tokens for each in data_sets)
    pairs = zip(sources, data_sets, strict=True)
    shares = [y.train.num_tokens / total if x.share is None else x.share for x, y in pairs]
    if smallest := next((n for n, x in zip(names, shares, strict=True) if x * PERIOD < 0.5), None):
        hint = "give it a larger share, or join it with another source"
        raise UsageError(f"{key}: {smallest}: its share rounds to 0 of {PERIOD:,} samples; {hint}")

    def part(name: str) -> tuple[MixedSource, ...]:
        streams = [getattr(each, name) for each in data_sets]
        triples = zip(sources, shares, streams, strict=True)
        return tuple(MixedSource(s.name, share, each) for s, share, each in triples if each)

    val = part("val")
    return DataSet(
        Mixture(part("train"), "" if key == "data.path" else f" ({key})"),
        Mixture(val, " (data.val_fraction)") if val else None,
        first.tokenizer,
        first.vocab_size,
        ", ".join(f"{n} ({x:.1%})" for n, x in zip(names, shares, strict=True)),
        generation_prompt=first.generation_prompt,
        files=tuple(file for each in data_sets for file in each.files),
        token_files=tuple(file for each in data_sets for file in each.token_files),
        notes=(*_share_notes([x.typed_share or 0 for x in sources]), *_notes(names, data_sets)),
        format_notes=tuple(note for each in data_sets for note in each.format_notes),
        date=next((each.date for each in data_sets if each.date), None),
        template=next((each.template for each in data_sets if each.template), None),
        end_tokens=tuple(dict.fromkeys(end for each in data_sets for end in each.end_tokens)),
        has_val_files=any(each.has_val_files for each in data_sets),
    )


def _share_notes(weights: Sequence[float]) -> Iterator[str]:
    """Yield a note if shares look like fractions but don't add up to 1; any numbers are valid."""
    total = sum(weights)
    if 0 < max(weights) < 1 and not math.isclose(total, 1, abs_tol=1e-2):
        shares = ", ".join(f"{each:g}" for each in weights)
        yield f"shares {shares} add up to {total:g} and are scaled to a sum of 1"


def _notes(names: Sequence[str], data_sets: Sequence[DataSet]) -> tuple[str, ...]:
    counts = Counter(note for each in data_sets for note in each.notes)
    pairs = list(zip(names, data_sets, strict=True))
    lines = (
        note if counts[note] == len(data_sets) else f"{name}: {note}"
        for name, each in pairs
        for note in each.notes
    )
    return (*(f"{name}: {each.description}" for name, each in pairs), *dict.fromkeys(lines))


def check_same_tokenizer(path: str, one: DataSet, other_path: str, other: DataSet) -> None:
    same_tokenizer = other.tokenizer.checksum == one.tokenizer.checksum
    if not same_tokenizer or other.vocab_size != one.vocab_size:
        raise UsageError(
            f"{other_path}: expected tokens of {one.tokenizer.name} ({one.vocab_size:,} tokens), "
            f"as in {path}, got tokens of {other.tokenizer.name} ({other.vocab_size:,} tokens)"
        )
