"""A conversation as the samples that it is trained by: texts, and which characters have a loss."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from fsdpctl.data.chats.conversation import (
    Conversation,
    text_of,
    with_arguments,
    with_joined_parts,
)
from fsdpctl.data.chats.marks import marks_in_whole, marks_of
from fsdpctl.data.chats.render import Renderer, RenderError, Spans
from fsdpctl.data.chats.rows import Chat, Message
from fsdpctl.data.chats.turns import TurnError, find_turn
from fsdpctl.errors import UsageError


class Sample(msgspec.Struct, array_like=True):
    """A text and the characters of it, half-open spans in order, that have a loss."""

    text: str
    spans: Spans
    is_marked: bool = False  # by the template: to the letter then, whatever tokens they cut


class Made(msgspec.Struct, array_like=True):
    """The samples of a conversation, and what is worth counting about it."""

    samples: list[Sample]
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is trained of a conversation; fields as the keys of the section `data`."""

    train_on: str
    rewritten_turns: str


@dataclass(slots=True)
class _Answer:
    """An answer, in the rendering in which it is the last."""

    index: int
    spans: Spans
    settled: int  # up to where a longer rendering has to agree, to hold it as it was
    is_prompted: bool = True


@dataclass(slots=True)
class _Work:
    talk: Conversation
    wanted: Wanted
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, name: str, number: int = 1) -> None:
        if number:
            self.counts[name] = self.counts.get(name, 0) + number


def make_samples(talk: Conversation, wanted: Wanted) -> Made:
    """The samples of a conversation.

    Raises:
        RenderError: the template refuses it.
        TurnError: where an answer begins or ends cannot be said, or turns are rewritten and
            `rewritten_turns` is `refuse`.
    """
    work = _Work(talk, wanted)
    whole = talk.upto(len(talk.messages))
    _count_texts(work, whole.text)
    kept = [index for index in talk.answers if talk.chat.trained[index]]
    work.count("answers", len(talk.answers))
    work.count("switched_off", len(talk.answers) - len(kept))
    if wanted.train_on == "all":
        return Made([_all_but(work, whole.text)], work.counts)
    if wanted.train_on == "last":
        kept = [index for index in kept if index == talk.answers[-1]]
    if not kept:
        return Made([Sample(whole.text, [])], work.counts)
    return Made(_of_answers(work, kept), work.counts)


def _of_answers(work: _Work, kept: list[int]) -> list[Sample]:
    talk, wanted = work.talk, work.wanted
    whole = talk.upto(len(talk.messages))
    answers = [_answer(work, index) for index in kept]
    work.count("not_as_served", sum(not each.is_prompted for each in answers))
    rewritten = [each for each in answers if not _stands(talk, each, whole.text)]
    if not rewritten and talk.renderer.has_marks and kept == talk.answers:
        return [Sample(whole.text, whole.marks, is_marked=True)]
    if not rewritten:
        return [_sample(talk, len(talk.messages), answers)]
    work.count("rewritten_chats")
    if wanted.rewritten_turns == "refuse":
        raise TurnError(
            f"message {rewritten[0].index + 1}: the template writes it otherwise once others "
            "follow (data.rewritten_turns=refuse)"
        )
    if wanted.rewritten_turns == "keep":
        return [_as_it_stands(talk, kept)]
    if wanted.rewritten_turns == "last":
        last = answers[-1]
        return [_sample(talk, last.index + 1, [last])]
    return _split(talk, answers)


def _split(talk: Conversation, answers: list[_Answer]) -> list[Sample]:
    """As few samples as hold every answer as it is when it is the last, in order of their ends."""
    samples, rest = [], answers
    while rest:
        last = rest[-1]
        text = talk.upto(last.index + 1).text
        held = [each for each in rest if each is last or _stands(talk, each, text)]
        samples.append(_sample(talk, last.index + 1, held))
        rest = [each for each in rest if each not in held]
    return samples[::-1]


def _answer(work: _Work, index: int) -> _Answer:
    talk = work.talk
    if talk.renderer.has_marks:
        own, holding = marks_of(talk, index)
        return _Answer(index, own, own[holding][1])
    turn = find_turn(talk, index, index + 1)
    return _Answer(index, [(turn.start, turn.stop)], turn.stop, turn.is_prompted)


def _stands(talk: Conversation, answer: _Answer, text: str) -> bool:
    """Whether a longer rendering has the answer, and what is before it, as when it is the last."""
    return text.startswith(talk.upto(answer.index + 1).text[: answer.settled])


def _sample(talk: Conversation, count: int, answers: list[_Answer]) -> Sample:
    """The first `count` messages, with a loss on the answers, which stand in it."""
    rendered = talk.upto(count)
    marked = talk.renderer.has_marks
    spans: Spans = []
    for answer in answers:
        # A mark behind the content may be of the end of the conversation, which is elsewhere now.
        within = rendered.marks if marked and answer.index < count - 1 else answer.spans
        spans += (each for each in answer.spans if each in within)
    return Sample(rendered.text, spans, marked)


def _as_it_stands(talk: Conversation, kept: list[int]) -> Sample:
    """All messages, with a loss on answers as they are written there."""
    count = len(talk.messages)
    spans: Spans = []
    for index in kept:
        if talk.renderer.has_marks:
            spans += marks_in_whole(talk, index)
        else:
            turn = find_turn(talk, index, count)
            spans.append((turn.start, turn.stop))
    return Sample(talk.upto(count).text, spans, talk.renderer.has_marks)


def _all_but(work: _Work, whole: str) -> Sample:
    """Everything, but the answers that the data switches off."""
    talk = work.talk
    off = [index for index in talk.answers if not talk.chat.trained[index]]
    spans, done = [], 0
    for start, stop in _as_it_stands(talk, off).spans if off else []:
        spans.append((done, start))
        done = stop
    return Sample(whole, [*spans, (done, len(whole))])


def _count_texts(work: _Work, whole: str) -> None:
    """Count what the words of the data do that nobody may have meant."""
    controls = work.talk.controls
    for message in work.talk.messages:
        text = text_of(message)
        if controls is not None and controls.search(text):
            work.count("control_tokens")
        if message["role"] in ("system", "developer", "user") and text.strip() not in whole:
            work.count("left_out")


def samples_of(
    renderer: Renderer, chat: Chat, wanted: Wanted, controls: re.Pattern[str] | None
) -> Made:
    """The samples of a chat, in the one of its spellings that the template takes.

    Calls' arguments are tried as objects and as JSON; content in parts as it is and as one text.

    Args:
        renderer: the template.
        chat: the conversation.
        wanted: what of it is trained.
        controls: finds the tokenizer's control tokens in text; None: it has none.

    Raises:
        RenderError: as `make_samples`; so for TurnError.
    """
    refusals: list[RenderError] = []
    for name, spelt in _spellings(chat):
        talk = Conversation(renderer, spelt, controls)
        try:
            whole = talk.upto(len(spelt.messages)).text
        except RenderError as error:
            refusals.append(error)
            continue
        if any(str(each["content"]) in whole for each in spelt.messages if _has_parts(each)):
            refusals.append(RenderError("the template takes no content in parts"))
            continue
        made = make_samples(talk, wanted)
        return Made(made.samples, {**made.counts, **({name: 1} if name else {})})
    raise refusals[0]


def _spellings(chat: Chat) -> Iterator[tuple[str, Chat]]:
    """The chat, and how it may be written otherwise, each with the name that it is counted by."""
    try:
        objects = with_arguments(chat, as_text=False)
    except UsageError as error:
        raise RenderError(str(error)) from None
    yield "", objects
    if any(each.get("tool_calls") for each in chat.messages):
        yield "arguments_as_text", with_arguments(chat, as_text=True)
    if any(_has_parts(each) for each in chat.messages):
        yield "joined_parts", with_joined_parts(objects)


def _has_parts(message: Message) -> bool:
    return isinstance(message["content"], list)
