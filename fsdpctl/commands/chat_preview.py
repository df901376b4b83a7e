"""Conversations as text: samples with the trained tokens highlighted, and prompts for an answer."""

from collections.abc import Sequence

import numpy as np
from rich.text import Text

from fsdpctl.chats.formats import Chat
from fsdpctl.chats.template_processes import render_chats
from fsdpctl.chats.values import Message
from fsdpctl.data.chat_template import open_template
from fsdpctl.data.open_chats import template_setup_of
from fsdpctl.data.packing import DocumentSet
from fsdpctl.data.tokenizer import FileTokenizer
from fsdpctl.io.texts import printable

_TRAINED = "bold green"
_OPEN, _CLOSE = "⟦", "⟧"  # rare in conversations
_MOST_SHOWN = 2000  # tokens of a sample
_BAR = 40  # columns


def preview(
    chats: DocumentSet, tokenizer: FileTokenizer, *, count: int = 2, color: bool = True
) -> list[Text]:
    """Return the first `count` samples as text, with trained tokens in color or in brackets."""
    shown = range(min(count, len(chats)))
    return [_sample_text(chats, tokenizer, number, color=color) for number in shown]


def _sample_text(chats: DocumentSet, tokenizer: FileTokenizer, number: int, *, color: bool) -> Text:
    tokens, trained = chats[number]
    text = Text()
    done = ""
    shown = [int(each) for each in tokens[:_MOST_SHOWN]]
    edges = [0, *(np.flatnonzero(np.diff(trained[:_MOST_SHOWN])) + 1).tolist(), len(shown)]
    for start, stop in zip(edges, edges[1:], strict=False):
        done, piece = _piece(tokenizer, shown, done, (start, stop))
        piece = printable(piece)
        if trained[start]:
            text.append(piece if color else f"{_OPEN}{piece}{_CLOSE}", style=_TRAINED)
        else:
            text.append(piece)
    if len(tokens) > len(shown):
        text.append(f" … {len(tokens) - len(shown):,} more tokens")
    return text


def _piece(
    tokenizer: FileTokenizer, tokens: Sequence[int], done: str, span: tuple[int, int]
) -> tuple[str, str]:
    """Return the text up to the end of the span, and the part of it that belongs to the span.

    The part is taken from the whole text, because spaces depend on the tokens before.
    """
    start, stop = span
    whole = tokenizer.decode(tokens[:stop], skip_special_tokens=False)
    if whole.startswith(done):
        return whole, whole[len(done) :]
    return whole, tokenizer.decode(tokens[start:stop], skip_special_tokens=False)


def histogram(chats: Sequence[DocumentSet]) -> list[str]:
    """Return the distribution of sample lengths: a line with a bar for each power of two."""
    lengths = np.concatenate([each.lengths for each in chats])
    bins = np.bincount(np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64))
    used = np.flatnonzero(bins)
    if not len(used):
        return []
    lines = []
    for power in range(int(used[0]), int(used[-1]) + 1):
        bar = "█" * round(_BAR * bins[power] / bins.max())
        lines.append(f"up to {1 << power:>8,} tokens {bins[power]:>9,} {bar}".rstrip())
    return lines


def prompt_tokens(tokenizer: FileTokenizer, messages: Sequence[Message], today: str) -> list[int]:
    """Return the prompt for an assistant message that follows `messages`.

    UsageError if there is no template, or if it rejects the messages.
    """
    template = open_template(tokenizer, None)
    chat = Chat(list(messages), [], is_question=True)
    setup, where = template_setup_of(template, tokenizer, today), template.source
    (made,) = render_chats(setup, where, [(chat, where)])
    (sample,) = made.samples
    return tokenizer.encode_prompt(sample.text, add_special_tokens=False)
