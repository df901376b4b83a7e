"""Renders a conversation to the samples that it is trained on, and locates the trained text."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from fsdpctl.chats.conversation import RenderedChat, text_of, with_arguments
from fsdpctl.chats.formats import Chat
from fsdpctl.chats.render import Renderer, RenderError, Spans
from fsdpctl.chats.turns import Turn, find_turn
from fsdpctl.chats.values import Message
from fsdpctl.errors import UsageError


class ChatSample(msgspec.Struct, array_like=True):
    """A text and the spans of its characters that are trained on: half-open, in order."""

    text: str
    spans: Spans
    is_marked: bool = False  # whether the template's generation blocks define the spans


class ChatSamples(msgspec.Struct, array_like=True):
    """The samples of a conversation, and counts of events for notes."""

    samples: list[ChatSample]
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class LossPolicy:
    """Which parts of a conversation are trained on. The fields are settings of `data`."""

    train_on: str
    rewritten_turns: str


def samples_of(
    renderer: Renderer, chat: Chat, policy: LossPolicy, control_pattern: re.Pattern[str] | None
) -> ChatSamples:
    """Return the samples of a chat, in the first of its forms that the template supports.

    Arguments of calls are tried as objects and as JSON text, and content in parts is also tried as
    one text. RenderError if the template rejects the conversation. TurnError if the boundaries of
    an assistant message aren't certain.
    """
    errors: list[RenderError] = []
    for form in _forms(chat, renderer.takes_json_arguments):
        rendering = RenderedChat(renderer, form, control_pattern)
        try:
            text = rendering.render_prefix(len(form.messages)).text
        except RenderError as error:
            errors.append(error)
            continue
        # Such a template writes the list of parts as Python does.
        if any(str(each["content"]) in text for each in _messages_with_parts(form)):
            errors.append(RenderError("the template does not support content in parts"))
        elif any(_is_written_by_python(each, text) for each in _arguments(form)):
            errors.append(RenderError("the template writes arguments as Python does"))
        else:
            return _make_samples(rendering, policy)
    raise errors[0]


def _arguments(chat: Chat) -> Iterator[object]:
    for message in chat.messages:
        for call in message.get("tool_calls") or ():
            yield call.get("function", call).get("arguments")


def _is_written_by_python(arguments: object, text: str) -> bool:
    """Return whether a rendering has the `str` of a dict, which is not JSON."""
    if not isinstance(arguments, dict) or not arguments:
        return False
    return str(arguments) in text and json.dumps(arguments, ensure_ascii=False) not in text


def _forms(chat: Chat, takes_json_arguments: bool) -> Iterator[Chat]:
    """Yield a chat in all forms of its arguments and content."""
    # If a template accepts arguments as text, the first form keeps the JSON text of the data.
    if takes_json_arguments and any(isinstance(each, str) for each in _arguments(chat)):
        yield chat
    try:
        objects = with_arguments(chat, as_text=False)
    except UsageError as error:
        raise RenderError(str(error)) from None
    yield objects
    if any(each.get("tool_calls") for each in chat.messages):
        yield with_arguments(chat, as_text=True)
    if _messages_with_parts(chat):
        messages = [{**each, "content": text_of(each)} for each in objects.messages]
        yield msgspec.structs.replace(objects, messages=messages)


def _messages_with_parts(chat: Chat) -> list[Message]:
    return [each for each in chat.messages if isinstance(each["content"], list)]


def _make_samples(rendering: RenderedChat, policy: LossPolicy) -> ChatSamples:
    rendered = rendering.render_prefix(len(rendering.messages))
    counts = _count_texts(rendering, rendered.text)
    counts["answers"] = len(rendering.assistant_indices)
    if policy.train_on == "all":
        return ChatSamples([_sample_of_all(rendering, rendered.text)], counts)
    trained_indices = [i for i in rendering.assistant_indices if rendering.chat.trained[i]]
    if policy.train_on == "last":
        trained_indices = [i for i in trained_indices if i == rendering.assistant_indices[-1]]
    turns = [find_turn(rendering, index, index + 1) for index in trained_indices]
    has_marks = rendering.has_generation_blocks
    if not turns:
        samples = [ChatSample(rendered.text, [])]
    elif not all(_is_unchanged(rendering, each, rendered.text) for each in turns):
        counts["rewritten_chats"] += 1
        if policy.rewritten_turns == "keep":
            samples = [ChatSample(rendered.text, _spans_of(rendering, trained_indices), has_marks)]
        else:
            samples = _split(rendering, turns)
    elif has_marks and trained_indices == rendering.assistant_indices:
        samples = [ChatSample(rendered.text, rendered.generation_spans, is_marked=True)]
    else:
        samples = [_sample(rendering, len(rendering.messages), turns)]
    return ChatSamples(samples, counts)


def _split(rendering: RenderedChat, turns: list[Turn]) -> list[ChatSample]:
    """Return the fewest samples in which each turn is rendered as if it were last."""
    samples, remaining = [], turns
    while remaining:
        last = remaining[-1]
        text = rendering.render_prefix(last.index + 1).text
        equal = [each for each in remaining if each is last or _is_unchanged(rendering, each, text)]
        samples.append(_sample(rendering, last.index + 1, equal))
        remaining = [each for each in remaining if each not in equal]
    return samples[::-1]


def _is_unchanged(rendering: RenderedChat, turn: Turn, text: str) -> bool:
    return text.startswith(rendering.render_prefix(turn.index + 1).text[: turn.end_of_turn])


def _sample(rendering: RenderedChat, count: int, turns: list[Turn]) -> ChatSample:
    """Return a sample of the first `count` messages, trained on `turns`, which are unchanged."""
    rendered = rendering.render_prefix(count)
    marked = rendering.has_generation_blocks
    spans: Spans = []
    for turn in turns:
        # The spans come from a shorter rendering, whose last block may mark only its end.
        within = rendered.generation_spans if marked and turn.index < count - 1 else turn.spans
        spans += (each for each in turn.spans if each in within)
    return ChatSample(rendered.text, spans, marked)


def _spans_of(rendering: RenderedChat, indices: list[int]) -> Spans:
    """Return the spans of the assistant messages `indices` in the full rendering."""
    count = len(rendering.messages)
    return [span for index in indices for span in find_turn(rendering, index, count).spans]


def _sample_of_all(rendering: RenderedChat, text: str) -> ChatSample:
    """Return a sample of all messages, trained on everything but turns that the data masks."""
    masked = [index for index in rendering.assistant_indices if not rendering.chat.trained[index]]
    spans, position = [], 0
    for start, stop in _spans_of(rendering, masked):
        spans.append((position, start))
        position = stop
    return ChatSample(text, [*spans, (position, len(text))])


def _count_texts(rendering: RenderedChat, rendered: str) -> Counter[str]:
    counts, controls = Counter[str](), rendering.control_pattern
    for message in rendering.messages:
        text = text_of(message)
        if controls is not None and controls.search(text):
            counts["control_tokens"] += 1
        if message["role"] in ("system", "developer", "user") and text.strip() not in rendered:
            counts["left_out"] += 1
    return counts
