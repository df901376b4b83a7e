"""Conversations as they are trained, to be looked at before anything runs."""

from collections.abc import Sequence

import numpy as np
from rich.text import Text

from fsdpctl.data.chats.tokens import ChatTokens
from fsdpctl.data.tokenizer import FileTokenizer

_TRAINED = "bold green"
_OPEN, _CLOSE = "⟦", "⟧"  # in no text of a chat, as a rule
_MOST_SHOWN = 2000  # tokens of a sample
_BAR = 40  # columns


def preview(
    chats: ChatTokens, tokenizer: FileTokenizer, *, count: int = 2, colour: bool = True
) -> list[Text]:
    """The first samples as text, what has a loss in a style of its own.

    Args:
        chats: the samples.
        tokenizer: what made them.
        count: how many.
        colour: whether styles can be seen; else what has a loss stands in brackets.
    """
    return [
        sample_text(chats, tokenizer, number, colour=colour)
        for number in range(min(count, chats.num_samples))
    ]


def sample_text(
    chats: ChatTokens, tokenizer: FileTokenizer, number: int, *, colour: bool = True
) -> Text:
    """One sample, as `preview` shows it."""
    tokens, trained = chats.sample(number)
    text = Text()
    done = ""
    shown = [int(each) for each in tokens[:_MOST_SHOWN]]
    edges = [0, *(np.flatnonzero(np.diff(trained[:_MOST_SHOWN])) + 1).tolist(), len(shown)]
    for start, stop in zip(edges, edges[1:], strict=False):
        done, piece = _piece(tokenizer, shown, done, (start, stop))
        if trained[start]:
            text.append(piece if colour else f"{_OPEN}{piece}{_CLOSE}", style=_TRAINED)
        else:
            text.append(piece)
    if len(tokens) > len(shown):
        text.append(f" … {len(tokens) - len(shown):,} tokens more")
    return text


def _piece(
    tokenizer: FileTokenizer, tokens: Sequence[int], done: str, span: tuple[int, int]
) -> tuple[str, str]:
    """The text up to the end of the span, and what of it is the span's.

    Taken from the whole: how a token is spaced hangs on those before it.
    """
    start, stop = span
    whole = tokenizer.decode_all(tokens[:stop])
    if whole.startswith(done):
        return whole, whole[len(done) :]
    return whole, tokenizer.decode_all(tokens[start:stop])


def histogram(chats: ChatTokens) -> list[str]:
    """How long the samples are: a line for each power of two, with a bar."""
    lengths = chats.lengths
    bins = np.bincount(np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64))
    used = np.flatnonzero(bins)
    if not len(used):
        return []
    lines = []
    for power in range(int(used[0]), int(used[-1]) + 1):
        bar = "█" * round(_BAR * bins[power] / bins.max())
        lines.append(f"up to {1 << power:>8,} tokens {bins[power]:>9,} {bar}".rstrip())
    return lines
