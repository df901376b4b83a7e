"""The position of an assistant message in a rendering.

Templates with `generation` blocks mark it. For other templates, the conversation is rendered again
with other text in the message (after axolotl's turn locator): the difference is the content. The
trained span starts at the end of the prompt that a model is served with, and stops after the next
control token and those that always follow it. If that isn't certain, the conversation is rejected.
"""

import re
from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import dataclass

from fsdpctl.chats.conversation import Conversation, fillers_for, text_of, with_filler
from fsdpctl.chats.messages import ASSISTANT
from fsdpctl.chats.render import RenderError, Spans
from fsdpctl.chats.values import Message

_THOUGHT = "</think>"  # templates may move or drop the reasoning before it


class TurnError(Exception):
    """The boundaries of an assistant message can't be found; the text is for the user."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An assistant message in a rendering, in characters."""

    index: int
    spans: Spans
    end_of_turn: int  # a longer rendering that agrees up to here contains the message unchanged


def find_turn(talk: Conversation, index: int, count: int) -> Turn:
    """Locate message `index` in the rendering of the first `count` messages.

    TurnError if its boundaries aren't certain. RenderError if the template rejects the messages.
    """
    if talk.renderer.has_generation_blocks:
        return _marked(talk, index, count)
    whole = talk.render_prefix(count).text
    low, high = _content(talk, index, count)
    start, is_prompted = _start(talk, index, count, low)
    _check_header(talk, index, start, whole[start:low], is_prompted=is_prompted)
    end = _end(talk, index, count, high)
    return Turn(index, [(start, end)], end)


def _end(talk: Conversation, index: int, count: int, content: int) -> int:
    """Return where the control tokens after the content end that end the message.

    Tokens that directly follow the first one belong to the message if they do so both where the
    conversation ends with it and where it does not: Phi-4-mini ends only conversations with two.
    """
    whole, controls = talk.render_prefix(count).text, talk.controls
    first = controls.search(whole, content) if controls else None
    if controls is None or first is None:
        raise TurnError(
            f"message {index + 1}: no control token of the tokenizer ends the assistant message, "
            f"which is followed by {whole[content : content + 40]!r}"
        )
    end, following = first.end(), re.compile(rf"\s*(?:{controls.pattern})")
    while more := following.match(whole, end):
        if count == index + 1:
            belongs = _is_in_next_prompt(talk, index, whole[: more.end()], end)
        else:
            own = talk.render_prefix(index + 1).text.rstrip()
            belongs = own.endswith(whole[first.start() : more.end()])
        if not belongs:
            break
        end = more.end()
    return end


def _is_in_next_prompt(talk: Conversation, index: int, text: str, end: int) -> bool:
    """Return whether `text` begins the next prompt too, or the prompt differs before `end`."""
    later = next((each for each in talk.assistant_indices if each > index), index + 1)
    try:
        prompt = talk.render_prefix(later, add_generation_prompt=True).text
    except RenderError:
        return True
    return prompt.startswith(text) or not prompt.startswith(text[:end])


def _content(talk: Conversation, index: int, count: int) -> tuple[int, int]:
    whole = talk.render_prefix(count).text
    found = _differing(talk, index, talk.messages[:count], whole)
    if found is None:
        raise TurnError(f"message {index + 1}: the template does not write it")
    low, high = found
    inside = talk.controls.findall(whole, low, high) if talk.controls else []
    if foreign := first_absent(inside, str(talk.messages[index])):
        problem = f"boundaries not found: the span that changes with its text contains {foreign}"
        raise TurnError(f"message {index + 1}: {problem}")
    return low, high


def first_absent(words: Sequence[str], text: Container[str]) -> str | None:
    """Return the first word that a text lacks, after one search for each different word."""
    return next((each for each in dict.fromkeys(words) if each not in text), None)


def _differing(
    talk: Conversation, index: int, messages: list[Message], whole: str
) -> tuple[int, int] | None:
    low, high = len(whole), 0
    for filler in fillers_for(messages[index]):
        other = talk.render(_with_message(messages, index, filler)).text
        start, stop = _difference(whole, other) or (low, high)
        low, high = min(low, start), max(high, stop)
    return (low, high) if low <= high else None


def _start(talk: Conversation, index: int, count: int, content: int) -> tuple[int, bool]:
    """Return where the message's prompt ends, and whether the rendering begins with all of it."""
    whole, prompt = (
        talk.render_prefix(count).text,
        talk.render_prefix(index, add_generation_prompt=True).text,
    )
    if whole.startswith(prompt):
        return len(prompt), True
    # Earlier messages are rendered differently, so only the text after the previous one counts.
    before = _ends_of_message_before(talk, index, count)
    if before is None:
        return min(common_prefix(whole, prompt), content), False
    in_prompt, in_whole = before
    header = prompt[in_prompt:]
    same = common_prefix(header, whole[in_whole:])
    start = in_whole + same
    return start if same == len(header) else min(start, content), False


def _ends_of_message_before(talk: Conversation, index: int, count: int) -> tuple[int, int] | None:
    """Return where the previous message's content ends, in the prompt and in the rendering."""
    if index == 0 or talk.messages[index - 1]["role"] == ASSISTANT:
        return None
    ends = []
    for messages, prompted in ((talk.messages[:index], True), (talk.messages[:count], False)):
        whole = talk.render(messages, add_generation_prompt=prompted).text
        filler = fillers_for(messages[index - 1])[0]
        changed = _with_message(messages, index - 1, filler)
        span = _difference(whole, talk.render(changed, add_generation_prompt=prompted).text)
        if span is None:
            return None
        ends.append(span[1])
    return ends[0], ends[1]


def _with_message(messages: list[Message], index: int, filler: str) -> list[Message]:
    return [*messages[:index], with_filler(messages[index], filler), *messages[index + 1 :]]


def _difference(whole: str, other: str) -> tuple[int, int] | None:
    if other == whole:
        return None
    same = common_prefix(whole, other)
    most = min(len(whole), len(other)) - same
    return same, len(whole) - min(common_prefix(whole[::-1], other[::-1]), most)


def _check_header(
    talk: Conversation, index: int, start: int, ahead: str, *, is_prompted: bool
) -> None:
    """Check that a message doesn't begin with the header of assistant messages.

    `ahead` is the text between `start` and the content: whitespace, reasoning, or the opening of a
    call. A template that supports add_generation_prompt determines itself where a message begins.
    """
    if not ahead.strip():
        return
    if is_prompted:
        has_prompt = (
            talk.render_prefix(index).text
            != talk.render_prefix(index, add_generation_prompt=True).text
        )
        if has_prompt or not _ahead_of_plain(talk, index, start).strip():
            return
        why = "the template ignores add_generation_prompt"
    elif talk.controls is None or talk.controls.search(ahead) is None:
        return
    else:
        why = "the rendering does not begin with the prompt"
    problem = f"its beginning was not found: {why}, and {ahead.strip()[:40]!r} precedes the content"
    raise TurnError(f"message {index + 1}: {problem}")


def _ahead_of_plain(talk: Conversation, index: int, start: int) -> str:
    messages = [*talk.messages[:index], {"role": ASSISTANT, "content": "plain words"}]
    whole = talk.render(messages).text
    found = _differing(talk, index, messages, whole)
    return whole[start : found[0]] if found else whole[start:]


def common_prefix(one: str, other: str) -> int:
    counts = range(min(len(one), len(other)))
    return bisect_left(counts, True, key=lambda same: one[: same + 1] != other[: same + 1])


def _marked(talk: Conversation, index: int, count: int) -> Turn:
    """Return the generation blocks of a message; as the last one, they must enclose its content."""
    rendered = talk.render_prefix(count)
    later = next((each for each in talk.assistant_indices if index < each < count), None)
    stop = len(rendered.generation_spans) if later is None else _marks_before(talk, later)
    own = rendered.generation_spans[_marks_before(talk, index) : stop]
    body = text_of(talk.messages[index]).rpartition(_THOUGHT)[2].strip()
    texts = [rendered.text[start:stop] for start, stop in own]
    is_out = not "".join(texts).strip() or (body in rendered.text and body not in "".join(texts))
    if is_out and count == index + 1:
        raise TurnError(
            f"message {index + 1}: the template's generation blocks do not enclose it; blocks "
            "within a macro or a set block are misplaced"
        )
    holding = [span for span, text in zip(own, texts, strict=True) if body and body in text]
    return Turn(index, own, (holding or own)[0 if holding else -1][1] if own else 0)


def _marks_before(talk: Conversation, index: int) -> int:
    return (
        len(talk.render_prefix(index, add_generation_prompt=True).generation_spans) if index else 0
    )
