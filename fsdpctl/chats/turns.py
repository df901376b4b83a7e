"""Locates an assistant message in a rendering.

Templates with `generation` blocks mark the message. With other templates, the conversation is
rendered again with other text in the message (after axolotl's turn locator): the difference is the
content. The trained span starts where the prompt of inference ends, and stops after the next
control token and those that always follow it. Conversations without certain spans are rejected.
"""

import re
from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import dataclass

from fsdpctl.chats.conversation import RenderedChat, fillers_for, text_of, with_filler
from fsdpctl.chats.messages import ASSISTANT
from fsdpctl.chats.render import RenderError, Spans
from fsdpctl.chats.values import Message

_END_OF_THOUGHT = "</think>"  # templates may move or drop the reasoning before this token


class TurnError(Exception):
    """The boundaries of an assistant message can't be found; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An assistant message in a rendering, in characters."""

    index: int
    spans: Spans
    # A longer rendering that is equal up to here contains the message unchanged.
    end_of_turn: int


def find_turn(rendering: RenderedChat, index: int, count: int) -> Turn:
    """Locate message `index` in the rendering of the first `count` messages.

    TurnError if its boundaries aren't certain. RenderError if the template rejects the messages.
    """
    if rendering.has_generation_blocks:
        return _marked_turn(rendering, index, count)
    text = rendering.render_prefix(count).text
    low, high = _content_span(rendering, index, count)
    start, is_prompted = _start(rendering, index, count, low)
    _check_header(rendering, index, start, text[start:low], is_prompted=is_prompted)
    end = _end(rendering, index, count, high)
    return Turn(index, [(start, end)], end)


def _end(rendering: RenderedChat, index: int, count: int, content_end: int) -> int:
    """Return the end of the control tokens that end the message; its content ends at `content`.

    Further control tokens directly after the first belong to the message only if they follow it
    both at the end and in the middle of a conversation: Phi-4-mini writes a second token only at
    the end of the conversation.
    """
    text, controls = rendering.render_prefix(count).text, rendering.control_pattern
    first = controls.search(text, content_end) if controls else None
    if controls is None or first is None:
        raise TurnError(
            f"message {index + 1}: no control token of the tokenizer ends the assistant message, "
            f"which is followed by {text[content_end : content_end + 40]!r}"
        )
    end, following = first.end(), re.compile(rf"\s*(?:{controls.pattern})")
    while match := following.match(text, end):
        if count == index + 1:
            belongs = _is_in_next_prompt(rendering, index, text[: match.end()], end)
        else:
            shorter = rendering.render_prefix(index + 1).text.rstrip()
            belongs = shorter.endswith(text[first.start() : match.end()])
        if not belongs:
            break
        end = match.end()
    return end


def _is_in_next_prompt(rendering: RenderedChat, index: int, text: str, end: int) -> bool:
    """Return whether the next prompt begins with `text`, or differs from it before `end`."""
    later = next((each for each in rendering.assistant_indices if each > index), index + 1)
    try:
        prompt = rendering.prompt_for(later).text
    except RenderError:
        return True
    return prompt.startswith(text) or not prompt.startswith(text[:end])


def _content_span(rendering: RenderedChat, index: int, count: int) -> tuple[int, int]:
    text = rendering.render_prefix(count).text
    span = _changing_span(rendering, index, rendering.messages[:count], text)
    if span is None:
        raise TurnError(f"message {index + 1}: the chat template drops this message")
    low, high = span
    inside = rendering.control_pattern.findall(text, low, high) if rendering.control_pattern else []
    # Tokens that the message itself does not contain.
    if foreign := first_absent(inside, str(rendering.messages[index])):
        problem = f"boundaries not found: the span that changes with its text contains {foreign}"
        raise TurnError(f"message {index + 1}: {problem}")
    return low, high


def first_absent(tokens: Sequence[str], text: Container[str]) -> str | None:
    """Return the first token that is not in `text`, or None; equal tokens are searched once."""
    return next((each for each in dict.fromkeys(tokens) if each not in text), None)


def _changing_span(
    rendering: RenderedChat, index: int, messages: list[Message], text: str
) -> tuple[int, int] | None:
    """Return the span of `text` that differs if the message has other text; None: no difference."""
    low, high = len(text), 0
    for filler in fillers_for(messages[index]):
        other = rendering.render(_with_message(messages, index, filler)).text
        start, stop = _difference(text, other) or (low, high)
        low, high = min(low, start), max(high, stop)
    return (low, high) if low <= high else None


def _start(rendering: RenderedChat, index: int, count: int, content_start: int) -> tuple[int, bool]:
    """Return where the message's prompt ends, and whether the rendering begins with the prompt."""
    text, prompt = rendering.render_prefix(count).text, rendering.prompt_for(index).text
    if text.startswith(prompt):
        return len(prompt), True
    # The prompt renders earlier messages differently: compare the text after the previous message.
    ends = _previous_ends(rendering, index, count)
    if ends is None:
        return min(common_prefix_length(text, prompt), content_start), False
    in_prompt, in_text = ends
    header = prompt[in_prompt:]
    num_same = common_prefix_length(header, text[in_text:])
    start = in_text + num_same
    # A header that is equal only in part must not reach into the content.
    return start if num_same == len(header) else min(start, content_start), False


def _previous_ends(rendering: RenderedChat, index: int, count: int) -> tuple[int, int] | None:
    """Return where the content of the previous message ends, in the prompt and the rendering."""
    if index == 0 or rendering.messages[index - 1]["role"] == ASSISTANT:
        return None
    ends = []
    for stop, prompted in ((index, True), (count, False)):
        messages = rendering.messages[:stop]
        text = rendering.render(messages, add_generation_prompt=prompted).text
        filler = fillers_for(messages[index - 1])[0]
        changed = _with_message(messages, index - 1, filler)
        other = rendering.render(changed, add_generation_prompt=prompted).text
        span = _difference(text, other)
        if span is None:
            return None
        ends.append(span[1])
    return ends[0], ends[1]


def _with_message(messages: list[Message], index: int, filler: str) -> list[Message]:
    return [*messages[:index], with_filler(messages[index], filler), *messages[index + 1 :]]


def _difference(text: str, other: str) -> tuple[int, int] | None:
    """Return the span of `text` that differs from `other`, or None if they are equal."""
    if other == text:
        return None
    num_same = common_prefix_length(text, other)
    limit = min(len(text), len(other)) - num_same  # prefix and suffix must not overlap
    return num_same, len(text) - min(common_prefix_length(text[::-1], other[::-1]), limit)


def _check_header(
    rendering: RenderedChat, index: int, start: int, prefix: str, *, is_prompted: bool
) -> None:
    """Check that a trained span doesn't begin with the header of assistant messages.

    `prefix` is the text between `start` and the content, such as whitespace, reasoning, or the
    opening of a tool call. Prompts of templates with add_generation_prompt contain the header.
    """
    if not prefix.strip():
        return
    if is_prompted:
        supports_prompt = rendering.render_prefix(index).text != rendering.prompt_for(index).text
        if supports_prompt or not _text_before_plain(rendering, index, start).strip():
            return
        reason = "the template ignores add_generation_prompt"
    elif rendering.control_pattern is None or rendering.control_pattern.search(prefix) is None:
        return
    else:
        reason = "the rendering does not begin with the prompt"
    problem = f"beginning not found: {reason}, and {prefix.strip()[:40]!r} precedes the content"
    raise TurnError(f"message {index + 1}: {problem}")


def _text_before_plain(rendering: RenderedChat, index: int, start: int) -> str:
    messages = [*rendering.messages[:index], {"role": ASSISTANT, "content": "plain words"}]
    text = rendering.render(messages).text
    span = _changing_span(rendering, index, messages, text)
    return text[start : span[0]] if span else text[start:]


def common_prefix_length(one: str, other: str) -> int:
    counts = range(min(len(one), len(other)))
    return bisect_left(counts, True, key=lambda same: one[: same + 1] != other[: same + 1])


def _marked_turn(rendering: RenderedChat, index: int, count: int) -> Turn:
    """Return the generation blocks of a message, which must enclose its content if it is last."""
    rendered = rendering.render_prefix(count)
    later = next((each for each in rendering.assistant_indices if index < each < count), None)
    stop = len(rendered.generation_spans) if later is None else _marks_before(rendering, later)
    blocks = rendered.generation_spans[_marks_before(rendering, index) : stop]
    body = text_of(rendering.messages[index]).rpartition(_END_OF_THOUGHT)[2].strip()
    texts = [rendered.text[start:stop] for start, stop in blocks]
    marked = "".join(texts)
    is_misplaced = not marked.strip() or (body in rendered.text and body not in marked)
    if is_misplaced and count == index + 1:
        raise TurnError(
            f"message {index + 1}: the template's generation blocks do not enclose it; blocks "
            "within a macro or a set block are misplaced"
        )
    enclosing = [span for span, text in zip(blocks, texts, strict=True) if body and body in text]
    # The block with the content, else the last one.
    end_block = enclosing[0] if enclosing else blocks[-1] if blocks else (0, 0)
    return Turn(index, blocks, end_block[1])


def _marks_before(rendering: RenderedChat, index: int) -> int:
    return len(rendering.prompt_for(index).generation_spans) if index else 0
