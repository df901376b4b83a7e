"""What a line of data says, whatever its format: a conversation, or plain text."""

from typing import Any

import msgspec

Message = dict[str, Any]


class Chat(msgspec.Struct, frozen=True, array_like=True, tag="chat"):
    """A conversation for a template."""

    messages: list[Message]  # with `role`; content, tool_calls and the like as templates take them
    trained: list[bool]  # for each message, whether it has a loss where it is the assistant's
    tools: list[Any] | None = None
    options: dict[str, Any] = {}  # further variables of the template
    is_question: bool = False  # an answer is to follow: nothing is trained, and nothing refused


class Plain(msgspec.Struct, frozen=True, array_like=True, tag="plain"):
    """Text that is trained as it stands, ended by the tokenizer's end token."""

    text: str
    untrained: int = 0  # characters at its beginning that have no loss


Row = Chat | Plain


class Line(msgspec.Struct, frozen=True, array_like=True):
    """A row, and where it is from."""

    row: Row
    file: str
    number: int

    @property
    def where(self) -> str:
        """What a message about it begins with."""
        return f"{self.file}, line {self.number}"


def content_of(row: Row) -> bytes:
    """What the row says, as bytes: equal for equal rows, however they were written down."""
    return msgspec.msgpack.encode(row, order="deterministic")
