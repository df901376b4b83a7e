"""A conversation and its renderings, of its beginnings and with other words in a turn."""

import json
import re
from collections.abc import Sequence
from typing import Any

from fsdpctl.data.chats.messages import ASSISTANT, REASONING
from fsdpctl.data.chats.render import Rendered, Renderer
from fsdpctl.data.chats.rows import Chat, Message
from fsdpctl.io.documents import parse_json

# No two have a first or last character in common, so that whatever a template writes beside a
# content is seen by one of two not to be of it.
FILLERS = (
    "Dxw first filler words 4",
    "kzq second filler words 9",
    "Vju third filler words 7",
    "bqy fourth filler words 2",
)


def fillers_for(message: Message) -> list[str]:
    """Two that begin and end otherwise than the message does."""
    text = text_of(message).strip()
    return [each for each in FILLERS if each[0] != text[:1] and each[-1] != text[-1:]][:2]


class Conversation:
    """A chat under one template."""

    def __init__(self, renderer: Renderer, chat: Chat, controls: re.Pattern[str] | None) -> None:
        """`controls` finds the tokenizer's control tokens in text; None: it has none."""
        self.renderer, self.chat, self.controls = renderer, chat, controls
        self._known: dict[tuple[int, bool], Rendered] = {}

    @property
    def messages(self) -> list[Message]:
        """All of them."""
        return self.chat.messages

    @property
    def answers(self) -> list[int]:
        """Which messages are the assistant's."""
        return [i for i, each in enumerate(self.messages) if each["role"] == ASSISTANT]

    def upto(self, count: int, *, prompted: bool = False) -> Rendered:
        """The first `count` messages, rendered."""
        key = (count, prompted)
        if key not in self._known:
            self._known[key] = self.render(self.messages[:count], prompted=prompted)
        return self._known[key]

    def render(self, messages: Sequence[Message], *, prompted: bool = False) -> Rendered:
        """Any messages, with the tools and variables of this chat."""
        return self.renderer.render(
            messages, tools=self.chat.tools, options=self.chat.options, prompted=prompted
        )


def filled(message: Message, filler: str) -> Message:
    """The message with `filler` for its content, and for the names and arguments of its calls.

    Of one that only reasons, for its reasoning.
    """
    content = message["content"]
    changed = dict(message)
    if isinstance(content, list):
        changed["content"] = [{"type": "text", "text": filler}]
    elif content.strip():
        changed["content"] = filler
    if message.get("tool_calls"):
        changed["tool_calls"] = [_filled_call(call, filler) for call in message["tool_calls"]]
    if changed == message:
        changed |= {name: filler for name in REASONING if message.get(name)}
    return changed


def _filled_call(call: dict[str, Any], filler: str) -> dict[str, Any]:
    function = call.get("function", call)
    given = function.get("arguments", {})
    arguments: object = {filler: filler}
    changed = {**function, "name": filler}
    if "arguments" in function:
        changed["arguments"] = json.dumps(arguments) if isinstance(given, str) else arguments
    return {**call, "function": changed} if "function" in call else changed


def with_arguments(chat: Chat, *, as_text: bool) -> Chat:
    """The chat with the arguments of all calls as objects, or as JSON.

    Templates take one or the other; data has either.

    Raises:
        UsageError: they are text that is no JSON.
    """
    if not any(each.get("tool_calls") for each in chat.messages):
        return chat
    messages = [
        {**each, "tool_calls": [_with_arguments(call, as_text) for call in each["tool_calls"]]}
        if each.get("tool_calls")
        else each
        for each in chat.messages
    ]
    return Chat(messages, chat.trained, chat.tools, chat.options)


def _with_arguments(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    function = call.get("function", call)
    given = function.get("arguments")
    if given is None or isinstance(given, str) == as_text:
        return call
    if as_text:
        changed = {**function, "arguments": json.dumps(given, ensure_ascii=False)}
    else:
        where = f"the arguments of {function['name']:.40}"
        changed = {**function, "arguments": parse_json(given or "{}", dict[str, Any], where)}
    return {**call, "function": changed} if "function" in call else changed


def with_joined_parts(chat: Chat) -> Chat:
    """The chat with every content as one text, for templates that know no parts."""
    messages = [
        {**each, "content": text_of(each)} if isinstance(each["content"], list) else each
        for each in chat.messages
    ]
    return Chat(messages, chat.trained, chat.tools, chat.options)


def text_of(message: Message) -> str:
    """The message's content as one text."""
    content = message["content"]
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return str(content)
