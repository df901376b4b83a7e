"""Where an answer stands in a rendering, of templates that do not mark it.

The content is found by rendering the conversation again with other words in its place (after
axolotl's turn locator): what differs is the content, whatever the template does with it. What a
model writes begins before it, where the prompt that it is given ends, and goes on behind it, to
the end of the first control token. What cannot be found so is refused.
"""

from dataclasses import dataclass

from fsdpctl.data.chats.conversation import Conversation, filled, fillers_for
from fsdpctl.data.chats.messages import ASSISTANT
from fsdpctl.data.chats.rows import Message


class TurnError(Exception):
    """An answer's boundaries cannot be found; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer in a rendering, in characters."""

    start: int
    stop: int  # behind the control token that ends it
    is_prompted: bool  # the rendering begins with the prompt that a model is given when it serves


def find_turn(talk: Conversation, index: int, count: int) -> Turn:
    """Where message `index` stands in the rendering of the first `count` messages.

    Raises:
        TurnError: it cannot be said for sure.
        RenderError: the template refuses what it is given.
    """
    whole = talk.upto(count).text
    low, high = _content(talk, index, talk.messages[:count])
    start, is_prompted = _start(talk, index, count, low)
    _check_header(talk, index, start, whole[start:low], is_prompted=is_prompted)
    end = talk.controls.search(whole, high) if talk.controls else None
    if end is None:
        raise TurnError(
            f"message {index + 1}: no control token of the tokenizer ends the answer, which is "
            f"followed by {whole[high : high + 40]!r}"
        )
    return Turn(start, end.end(), is_prompted)


def _content(talk: Conversation, index: int, messages: list[Message]) -> tuple[int, int]:
    """What differs when other words stand in the message."""
    whole = talk.render(messages).text
    found = _differing(talk, index, messages, whole)
    if found is None:
        raise TurnError(f"message {index + 1}: the template does not write it")
    low, high = found
    own = str(messages[index])
    inside = talk.controls.findall(whole, low, high) if talk.controls else []
    foreign = [each for each in inside if each not in own]
    if foreign:
        raise TurnError(
            f"message {index + 1}: its boundaries were not found: {foreign[0]} lies between what "
            "differs when its words do"
        )
    return low, high


def _differing(
    talk: Conversation, index: int, messages: list[Message], whole: str
) -> tuple[int, int] | None:
    low, high = len(whole), 0
    for filler in fillers_for(messages[index]):
        changed = filled(messages[index], filler)
        other = talk.render([*messages[:index], changed, *messages[index + 1 :]]).text
        if other == whole:
            continue
        same = common_prefix(whole, other)
        most = min(len(whole), len(other)) - same
        behind = min(common_prefix(whole[::-1], other[::-1]), most)
        low, high = min(low, same), max(high, len(whole) - behind)
    return (low, high) if low <= high else None


def _start(talk: Conversation, index: int, count: int, content: int) -> tuple[int, bool]:
    """Where the prompt of an answer ends, and whether the rendering begins with all of it."""
    whole, prompt = talk.upto(count).text, talk.upto(index, prompted=True).text
    if whole.startswith(prompt):
        return len(prompt), True
    # Something before is written otherwise: only what stands behind the message before counts.
    before = _ends_of_message_before(talk, index, count)
    if before is None:
        return min(common_prefix(whole, prompt), content), False
    in_prompt, in_whole = before
    header = prompt[in_prompt:]
    same = common_prefix(header, whole[in_whole:])
    start = in_whole + same
    return start if same == len(header) else min(start, content), False


def _ends_of_message_before(talk: Conversation, index: int, count: int) -> tuple[int, int] | None:
    """Where its content ends, in the prompt and in the rendering."""
    if index == 0 or talk.messages[index - 1]["role"] == ASSISTANT:
        return None
    ends = []
    for messages, prompted in ((talk.messages[:index], True), (talk.messages[:count], False)):
        whole = talk.render(messages, prompted=prompted).text
        before = messages[index - 1]
        changed = filled(before, fillers_for(before)[0])
        others = [*messages[: index - 1], changed, *messages[index:]]
        other = talk.render(others, prompted=prompted).text
        if other == whole:
            return None
        same = common_prefix(whole, other)
        most = min(len(whole), len(other)) - same
        ends.append(len(whole) - min(common_prefix(whole[::-1], other[::-1]), most))
    return ends[0], ends[1]


def _check_header(
    talk: Conversation, index: int, start: int, ahead: str, *, is_prompted: bool
) -> None:
    """See that an answer does not begin with what the template writes ahead of every answer.

    `ahead` is what stands between `start` and the content: whitespace, reasoning, what opens a
    call. A template that tells prompts from histories says itself where answers begin.
    """
    if not ahead.strip():
        return
    if is_prompted:
        heeded = talk.upto(index).text != talk.upto(index, prompted=True).text
        if heeded or not _ahead_of_plain(talk, index, start).strip():
            return
        why = "the template does not heed add_generation_prompt"
    elif talk.controls is None or talk.controls.search(ahead) is None:
        return
    else:
        why = "the rendering does not begin with the prompt"
    raise TurnError(
        f"message {index + 1}: where it begins was not found: {why}, and {ahead.strip()[:40]!r} "
        "stands ahead of it"
    )


def _ahead_of_plain(talk: Conversation, index: int, start: int) -> str:
    """What stands between the prompt and an answer of words alone."""
    messages = [*talk.messages[:index], {"role": ASSISTANT, "content": "plain words"}]
    whole = talk.render(messages).text
    found = _differing(talk, index, messages, whole)
    return whole[start : found[0]] if found else whole[start:]


def common_prefix(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
