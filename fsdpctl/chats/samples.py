"""Renders a conversation to the samples that it is trained on, and locates the trained text."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from fsdpctl.chats.conversation import Conversation, text_of, with_arguments
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


@dataclass(slots=True)
class _Work:
    dialog: Conversation
    policy: LossPolicy
    counts: Counter[str] = field(default_factory=Counter)


def samples_of(
    renderer: Renderer, chat: Chat, policy: LossPolicy, controls: re.Pattern[str] | None
) -> ChatSamples:
    """Return the samples of a chat, in the first of its forms that the template supports.

    Arguments of calls are tried as objects and as JSON text, and content in parts is also tried as
    one text. RenderError if the template rejects the conversation. TurnError if the boundaries of
    an assistant message aren't certain.
    """
    errors: list[RenderError] = []
    for form in _forms(chat, renderer.takes_json_arguments):
        dialog = Conversation(renderer, form, controls)
        try:
            text = dialog.render_prefix(len(form.messages)).text
        except RenderError as error:
            errors.append(error)
            continue
        if any(str(each["content"]) in text for each in _messages_with_parts(form)):
            errors.append(RenderError("the template does not support content in parts"))
            continue
        if any(_is_written_by_python(each, text) for each in _arguments(form)):
            errors.append(RenderError("the template writes arguments as Python does"))
            continue
        return _make_samples(dialog, policy)
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


def _forms(chat: Chat, takes_text: bool) -> Iterator[Chat]:
    """Yield a chat in all forms of its arguments and content.

    If a template accepts arguments as text, JSON text of the data stays unchanged.
    """
    if takes_text and any(isinstance(each, str) for each in _arguments(chat)):
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


def _make_samples(dialog: Conversation, policy: LossPolicy) -> ChatSamples:
    work = _Work(dialog, policy)
    rendered = dialog.render_prefix(len(dialog.messages))
    _count_texts(work, rendered.text)
    trained = [index for index in dialog.assistant_indices if dialog.chat.trained[index]]
    work.counts["answers"] = len(dialog.assistant_indices)
    if policy.train_on == "all":
        return ChatSamples([_sample_of_all(work, rendered.text)], work.counts)
    if policy.train_on == "last":
        trained = [index for index in trained if index == dialog.assistant_indices[-1]]
    if not trained:
        return ChatSamples([ChatSample(rendered.text, [])], work.counts)
    return ChatSamples(_answer_samples(work, trained), work.counts)


def _answer_samples(work: _Work, trained: list[int]) -> list[ChatSample]:
    dialog = work.dialog
    rendered = dialog.render_prefix(len(dialog.messages))
    answers = [find_turn(dialog, index, index + 1) for index in trained]
    if all(_is_unchanged(dialog, each, rendered.text) for each in answers):
        if dialog.renderer.has_generation_blocks and trained == dialog.assistant_indices:
            return [ChatSample(rendered.text, rendered.generation_spans, is_marked=True)]
        return [_sample(dialog, len(dialog.messages), answers)]
    work.counts["rewritten_chats"] += 1
    if work.policy.rewritten_turns == "keep":
        return [_sample_of_rewritten(dialog, trained)]
    return _split(dialog, answers)


def _split(dialog: Conversation, answers: list[Turn]) -> list[ChatSample]:
    """Return the fewest samples in which each answer has its text as the last message."""
    samples, remaining = [], answers
    while remaining:
        last = remaining[-1]
        text = dialog.render_prefix(last.index + 1).text
        equal = [each for each in remaining if each is last or _is_unchanged(dialog, each, text)]
        samples.append(_sample(dialog, last.index + 1, equal))
        remaining = [each for each in remaining if each not in equal]
    return samples[::-1]


def _is_unchanged(dialog: Conversation, answer: Turn, text: str) -> bool:
    return text.startswith(dialog.render_prefix(answer.index + 1).text[: answer.end_of_turn])


def _sample(dialog: Conversation, count: int, answers: list[Turn]) -> ChatSample:
    """Return a sample of the first `count` messages, trained on `answers`, which are unchanged."""
    rendered = dialog.render_prefix(count)
    marked = dialog.renderer.has_generation_blocks
    spans: Spans = []
    for answer in answers:
        # A block after the content may have marked the end of the shorter conversation.
        within = rendered.generation_spans if marked and answer.index < count - 1 else answer.spans
        spans += (each for each in answer.spans if each in within)
    return ChatSample(rendered.text, spans, marked)


def _sample_of_rewritten(dialog: Conversation, indices: list[int]) -> ChatSample:
    """Return a sample of all messages, whose spans are the answers `indices`, even if rewritten."""
    count = len(dialog.messages)
    spans = [span for index in indices for span in find_turn(dialog, index, count).spans]
    text = dialog.render_prefix(count).text
    return ChatSample(text, spans, dialog.renderer.has_generation_blocks)


def _sample_of_all(work: _Work, text: str) -> ChatSample:
    """Return a sample of all messages, trained on everything but answers that the data masks."""
    dialog = work.dialog
    masked = [index for index in dialog.assistant_indices if not dialog.chat.trained[index]]
    spans, position = [], 0
    for start, stop in _sample_of_rewritten(dialog, masked).spans if masked else []:
        spans.append((position, start))
        position = stop
    return ChatSample(text, [*spans, (position, len(text))])


def _count_texts(work: _Work, rendered: str) -> None:
    controls = work.dialog.control_pattern
    for message in work.dialog.messages:
        text = text_of(message)
        if controls is not None and controls.search(text):
            work.counts["control_tokens"] += 1
        if message["role"] in ("system", "developer", "user") and text.strip() not in rendered:
            work.counts["left_out"] += 1
