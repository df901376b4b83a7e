"""A conversation as the samples that it is trained by: texts, and which characters are trained."""

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
    is_marked: bool = False  # by the template: the spans are exact, whatever tokens they cut


class ChatSamples(msgspec.Struct, array_like=True):
    """The samples of a conversation, and counts of what is worth a note."""

    samples: list[ChatSample]
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class LossPolicy:
    """Which parts of a conversation are trained on; fields as the keys of the section `data`."""

    train_on: str
    rewritten_turns: str


@dataclass(slots=True)
class _Work:
    talk: Conversation
    policy: LossPolicy
    counts: Counter[str] = field(default_factory=Counter)


def samples_of(
    renderer: Renderer, chat: Chat, policy: LossPolicy, controls: re.Pattern[str] | None
) -> ChatSamples:
    """Return the samples of a chat, in the first of its spellings that the template supports.

    Arguments of calls are tried as objects and as JSON text, content in parts as it is and as one
    text. RenderError if the template rejects the conversation. TurnError if the boundaries of an
    assistant message aren't certain.
    """
    errors: list[RenderError] = []
    for spelled in _spellings(chat, renderer.takes_json_arguments):
        talk = Conversation(renderer, spelled, controls)
        try:
            whole = talk.render_prefix(len(spelled.messages)).text
        except RenderError as error:
            errors.append(error)
            continue
        if any(str(each["content"]) in whole for each in _of_parts(spelled)):
            errors.append(RenderError("the template does not support content in parts"))
            continue
        if any(_is_written_by_python(each, whole) for each in _arguments(spelled)):
            errors.append(RenderError("the template writes arguments as Python does"))
            continue
        return _make_samples(talk, policy)
    raise errors[0]


def _arguments(chat: Chat) -> Iterator[object]:
    for message in chat.messages:
        for call in message.get("tool_calls") or ():
            yield call.get("function", call).get("arguments")


def _is_written_by_python(arguments: object, text: str) -> bool:
    """Return whether a rendering has an object as Python writes it, which is not JSON."""
    if not isinstance(arguments, dict) or not arguments:
        return False
    return str(arguments) in text and json.dumps(arguments, ensure_ascii=False) not in text


def _spellings(chat: Chat, takes_text: bool) -> Iterator[Chat]:
    """Yield the chat and its other spellings.

    A template that `takes_text` writes JSON text as it is in the data.
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
    if _of_parts(chat):
        messages = [{**each, "content": text_of(each)} for each in objects.messages]
        yield msgspec.structs.replace(objects, messages=messages)


def _of_parts(chat: Chat) -> list[Message]:
    return [each for each in chat.messages if isinstance(each["content"], list)]


def _make_samples(talk: Conversation, policy: LossPolicy) -> ChatSamples:
    work = _Work(talk, policy)
    whole = talk.render_prefix(len(talk.messages))
    _count_texts(work, whole.text)
    kept = [index for index in talk.assistant_indices if talk.chat.trained[index]]
    work.counts["answers"] = len(talk.assistant_indices)
    if policy.train_on == "all":
        return ChatSamples([_all_but(work, whole.text)], work.counts)
    if policy.train_on == "last":
        kept = [index for index in kept if index == talk.assistant_indices[-1]]
    if not kept:
        return ChatSamples([ChatSample(whole.text, [])], work.counts)
    return ChatSamples(_of_answers(work, kept), work.counts)


def _of_answers(work: _Work, kept: list[int]) -> list[ChatSample]:
    talk = work.talk
    whole = talk.render_prefix(len(talk.messages))
    answers = [find_turn(talk, index, index + 1) for index in kept]
    if all(_is_unchanged(talk, each, whole.text) for each in answers):
        if talk.renderer.has_generation_blocks and kept == talk.assistant_indices:
            return [ChatSample(whole.text, whole.generation_spans, is_marked=True)]
        return [_sample(talk, len(talk.messages), answers)]
    work.counts["rewritten_chats"] += 1
    if work.policy.rewritten_turns == "keep":
        return [_as_rewritten(talk, kept)]
    return _split(talk, answers)


def _split(talk: Conversation, answers: list[Turn]) -> list[ChatSample]:
    """Return the fewest samples that contain each message as it is when it is the last one."""
    samples, rest = [], answers
    while rest:
        last = rest[-1]
        text = talk.render_prefix(last.index + 1).text
        held = [each for each in rest if each is last or _is_unchanged(talk, each, text)]
        samples.append(_sample(talk, last.index + 1, held))
        rest = [each for each in rest if each not in held]
    return samples[::-1]


def _is_unchanged(talk: Conversation, answer: Turn, text: str) -> bool:
    return text.startswith(talk.render_prefix(answer.index + 1).text[: answer.end_of_turn])


def _sample(talk: Conversation, count: int, answers: list[Turn]) -> ChatSample:
    """Return the first `count` messages, trained on `answers`, which they contain unchanged."""
    rendered = talk.render_prefix(count)
    marked = talk.renderer.has_generation_blocks
    spans: Spans = []
    for answer in answers:
        # A block after the content may mark the end of the conversation, which has moved by now.
        within = rendered.generation_spans if marked and answer.index < count - 1 else answer.spans
        spans += (each for each in answer.spans if each in within)
    return ChatSample(rendered.text, spans, marked)


def _as_rewritten(talk: Conversation, kept: list[int]) -> ChatSample:
    """Return all messages, trained on assistant messages as they are written there."""
    count = len(talk.messages)
    spans = [span for index in kept for span in find_turn(talk, index, count).spans]
    return ChatSample(talk.render_prefix(count).text, spans, talk.renderer.has_generation_blocks)


def _all_but(work: _Work, whole: str) -> ChatSample:
    """Return all messages, trained on everything but the assistant messages masked by the data."""
    talk = work.talk
    off = [index for index in talk.assistant_indices if not talk.chat.trained[index]]
    spans, done = [], 0
    for start, stop in _as_rewritten(talk, off).spans if off else []:
        spans.append((done, start))
        done = stop
    return ChatSample(whole, [*spans, (done, len(whole))])


def _count_texts(work: _Work, whole: str) -> None:
    controls = work.talk.controls
    for message in work.talk.messages:
        text = text_of(message)
        if controls is not None and controls.search(text):
            work.counts["control_tokens"] += 1
        if message["role"] in ("system", "developer", "user") and text.strip() not in whole:
            work.counts["left_out"] += 1
