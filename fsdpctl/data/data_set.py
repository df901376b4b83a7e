"""The data of a run."""

from dataclasses import dataclass

from fsdpctl.data.mixture import Mixture
from fsdpctl.data.packing import DocumentSet
from fsdpctl.data.token_formats import TokenFile
from fsdpctl.data.tokenizer import Tokenizer
from fsdpctl.data.tokens import TokenStream

Corpus = TokenStream | DocumentSet | Mixture


def contents_of(corpus: Corpus) -> tuple[TokenStream | DocumentSet, ...]:
    """Return the contents of the sources of a mixture, or that of one source."""
    return tuple(x.content for x in corpus.parts) if isinstance(corpus, Mixture) else (corpus,)


@dataclass(frozen=True, slots=True)
class DataSet:
    """The data that a run trains and validates on."""

    train: Corpus
    val: Corpus | None
    tokenizer: Tokenizer
    vocab_size: int  # 0: unknown
    description: str
    gzip_bits_per_byte: float | None  # of the validation text, compressed by `gzip -9`
    token_files: tuple[TokenFile, ...] = ()  # that the data is read from
    notes: tuple[str, ...] = ()  # lines about the data
    about_files: tuple[str, ...] = ()  # those notes that tell what the files of chats mean
    date: str | None = None  # that chats were rendered with, if the template writes it
    template: str | None = None  # of chats, if it isn't that of the tokenizer
    end_tokens: tuple[int, ...] = ()  # that end a trained assistant message, most frequent first
    prompt: tuple[int, ...] = ()  # to generate a sample from
    has_val_files: bool = False  # whether `val` has files of its own, and is not held out

    @property
    def has_text(self) -> bool:
        """Whether the tokenizer of its tokens is known."""
        return self.tokenizer.vocab_size == self.vocab_size

    @property
    def fingerprint(self) -> str:
        """A checksum of the content of both parts."""
        return self.train.fingerprint + (self.val.fingerprint if self.val else "")
