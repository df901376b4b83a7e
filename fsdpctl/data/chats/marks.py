"""Where answers stand in renderings of templates that mark them with `{% generation %}`."""

from fsdpctl.data.chats.conversation import Conversation, text_of
from fsdpctl.data.chats.render import Spans
from fsdpctl.data.chats.turns import TurnError

_THOUGHT = "</think>"  # what comes before it templates may write elsewhere, or leave out


def marks_of(talk: Conversation, index: int) -> tuple[Spans, int]:
    """The marks of message `index` where it is the last, and which of them has its content.

    Raises:
        TurnError: they do not enclose what it says.
        RenderError: the template refuses what it is given.
    """
    rendered = talk.upto(index + 1)
    own = rendered.marks[_marks_before(talk, index) :]
    body = text_of(talk.messages[index]).rpartition(_THOUGHT)[2].strip()
    texts = [rendered.text[start:stop] for start, stop in own]
    if not "".join(texts).strip() or (body in rendered.text and body not in "".join(texts)):
        raise TurnError(
            f"message {index + 1}: the template's generation blocks do not enclose it; they are "
            "misplaced where they stand in a macro or a set block"
        )
    holding = [number for number, text in enumerate(texts) if body and body in text]
    return own, holding[0] if holding else len(own) - 1


def marks_in_whole(talk: Conversation, index: int) -> Spans:
    """The marks of message `index` in the rendering of all messages."""
    whole = talk.upto(len(talk.messages)).marks
    later = [each for each in talk.answers if each > index]
    stop = _marks_before(talk, later[0]) if later else len(whole)
    return whole[_marks_before(talk, index) : stop]


def _marks_before(talk: Conversation, index: int) -> int:
    """How many marks a prompt for the message has, which are of those before."""
    return len(talk.upto(index, prompted=True).marks) if index else 0
