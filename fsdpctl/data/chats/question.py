"""A conversation put to a model as its template puts it, for an answer."""

from collections.abc import Sequence
from pathlib import Path

from fsdpctl.data.chats.open import setup_of
from fsdpctl.data.chats.rows import Chat, Message
from fsdpctl.data.chats.template import open_template
from fsdpctl.data.chats.workers import workers
from fsdpctl.data.tokenizer import FileTokenizer


def question(
    folder: Path, tokenizer: FileTokenizer, messages: Sequence[Message], today: str
) -> list[int]:
    """The tokens that an answer to the last message follows.

    Args:
        folder: has the template.
        tokenizer: of the model.
        messages: with `role` and `content`.
        today: what the template takes for it, YYYY-MM-DD.

    Raises:
        UsageError: there is no template, or it refuses the messages.
    """
    template = open_template(folder, None)
    chat = Chat(list(messages), [], is_question=True)
    with workers(setup_of(template, tokenizer, today), template.source, 0) as found:
        (made,) = found.results([(chat, template.source)])
    (sample,) = made.samples
    return tokenizer.encode_prompt(sample.text)
