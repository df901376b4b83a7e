"""Conversations as text: samples with the trained tokens highlighted, and prompts for an answer."""

from collections.abc import Sequence

import numpy as np
from rich.text import Text

from fsdpctl.chats.formats import Chat
from fsdpctl.chats.template_processes import render_chats
from fsdpctl.chats.values import Message
from fsdpctl.data.chat_template import open_template
from fsdpctl.data.open_chats import make_template_setup
from fsdpctl.data.packing import DocumentSet
from fsdpctl.data.tokenizer import FileTokenizer
from fsdpctl.io.texts import printable

_TRAINED = "bold green"
_OPEN, _CLOSE = "⟦", "⟧"  # rare in conversations
_MAX_TOKENS = 2000  # shown of a sample
_BAR_WIDTH = 40  # columns of the longest bar


def preview(
    chats: DocumentSet, tokenizer: FileTokenizer, *, count: int = 2, color: bool = True
) -> list[Text]:
    """Return the first `count` samples as text, with trained tokens in color or in brackets."""
    indices = range(min(count, len(chats)))
    return [_sample_text(chats, tokenizer, index, color=color) for index in indices]


def _sample_text(chats: DocumentSet, tokenizer: FileTokenizer, index: int, *, color: bool) -> Text:
    tokens, trained = chats[index]
    text, decoded = Text(), ""
    ids = [int(each) for each in tokens[:_MAX_TOKENS]]
    # Positions at which trained and untrained tokens alternate.
    edges = [0, *(np.flatnonzero(np.diff(trained[:_MAX_TOKENS])) + 1).tolist(), len(ids)]
    for start, stop in zip(edges, edges[1:], strict=False):
        decoded, piece = _decode_next(tokenizer, ids, decoded, (start, stop))
        piece, is_trained = printable(piece), bool(trained[start])
        marked = f"{_OPEN}{piece}{_CLOSE}" if is_trained and not color else piece
        text.append(marked, style=_TRAINED if is_trained else None)
    if len(tokens) > len(ids):
        text.append(f" … {len(tokens) - len(ids):,} more tokens")
    return text


def _decode_next(
    tokenizer: FileTokenizer, tokens: Sequence[int], decoded: str, span: tuple[int, int]
) -> tuple[str, str]:
    """Return the text up to the end of `span`, and the part of the text that is in `span`.

    The part is cut from the whole text, because spaces depend on the previous tokens. `decoded` is
    the text before `span`.
    """
    start, stop = span
    text = tokenizer.decode(tokens[:stop], skip_special_tokens=False)
    if text.startswith(decoded):
        return text, text[len(decoded) :]
    return text, tokenizer.decode(tokens[start:stop], skip_special_tokens=False)


def histogram(chats: Sequence[DocumentSet]) -> list[str]:
    """Return the distribution of sample lengths: a line with a bar for each power of two."""
    lengths = np.concatenate([each.lengths for each in chats])
    counts = np.bincount(np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64))
    powers = np.flatnonzero(counts)
    if not len(powers):
        return []
    lines = []
    for power in range(int(powers[0]), int(powers[-1]) + 1):
        bar = "█" * round(_BAR_WIDTH * counts[power] / counts.max())
        lines.append(f"up to {1 << power:>8,} tokens {counts[power]:>9,} {bar}".rstrip())
    return lines


def prompt_tokens(tokenizer: FileTokenizer, messages: Sequence[Message], today: str) -> list[int]:
    """Return the prompt for an assistant message that follows `messages`.

    UsageError if there is no template, or if it rejects the messages.
    """
    template = open_template(tokenizer, None)
    chat = Chat(list(messages), [], add_generation_prompt=True)
    setup, location = make_template_setup(template, tokenizer, today), template.location
    (rendered,) = render_chats(setup, location, [(chat, location)])
    (sample,) = rendered.samples
    return tokenizer.encode_prompt(sample.text, add_special_tokens=False)
