"""A conversation, rendered up to any message, and with other text in a message."""

import json
import re
from functools import partial
from typing import Any

import msgspec

from fsdpctl.chats.formats import Chat
from fsdpctl.chats.messages import ASSISTANT, REASONING
from fsdpctl.chats.render import Rendered, Renderer
from fsdpctl.chats.values import Message
from fsdpctl.io.untrusted import parse_json

# Texts that replace the content of a message, to locate it in a rendering. All have different first
# and last characters: text that a template writes next to the content can equal only one of them.
FILLERS = (
    "Dxw first filler words 4", "kzq second filler words 9",
    "Vju third filler words 7", "bqy fourth filler words 2",
)  # fmt: skip


def fillers_for(message: Message) -> list[str]:
    """Return two fillers that begin and end with other characters than the message."""
    text = text_of(message).strip()
    return [each for each in FILLERS if each[0] != text[:1] and each[-1] != text[-1:]][:2]


class RenderedChat:
    """A chat that a template renders, in full and in part."""

    def __init__(
        self, renderer: Renderer, chat: Chat, control_pattern: re.Pattern[str] | None
    ) -> None:
        self.chat, self.control_pattern = chat, control_pattern
        self.has_generation_blocks = renderer.has_generation_blocks
        self.render = partial(renderer.render, tools=chat.tools, options=chat.options)
        self._cache: dict[tuple[int, bool], Rendered] = {}

    @property
    def messages(self) -> list[Message]:
        return self.chat.messages

    @property
    def assistant_indices(self) -> list[int]:
        return [i for i, each in enumerate(self.messages) if each["role"] == ASSISTANT]

    def render_prefix(self, count: int, *, add_generation_prompt: bool = False) -> Rendered:
        """Render the first `count` messages."""
        key = (count, add_generation_prompt)
        if key not in self._cache:
            messages = self.messages[:count]
            self._cache[key] = self.render(messages, add_generation_prompt=add_generation_prompt)
        return self._cache[key]

    def prompt_for(self, index: int) -> Rendered:
        """Render the messages before `index`, followed by the header of an assistant message."""
        return self.render_prefix(index, add_generation_prompt=True)


def with_filler(message: Message, filler: str) -> Message:
    """Replace the content of a message, and the names and arguments of its calls, by `filler`."""
    content = message["content"]
    changed = dict(message)
    if isinstance(content, list):
        changed["content"] = [{"type": "text", "text": filler}]
    elif content.strip():
        changed["content"] = filler
    if message.get("tool_calls"):
        changed["tool_calls"] = [_filled_call(call, filler) for call in message["tool_calls"]]
    if changed == message:  # neither content nor calls: replace the reasoning
        changed |= {name: filler for name in REASONING if message.get(name)}
    return changed


def _filled_call(call: dict[str, Any], filler: str) -> dict[str, Any]:
    function = call.get("function", call)
    arguments: object = {filler: filler}
    changed = {**function, "name": filler}
    if "arguments" in function:
        is_text = isinstance(function["arguments"], str)
        changed["arguments"] = json.dumps(arguments) if is_text else arguments
    return {**call, "function": changed} if "function" in call else changed


def with_arguments(chat: Chat, *, as_text: bool) -> Chat:
    """Return the chat with the arguments of all calls as objects, or as JSON text.

    A template may support only one of the two. UsageError if arguments are text that isn't JSON.
    """
    messages = [dict(each) for each in chat.messages]
    for message in messages:
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_with_arguments(call, as_text) for call in calls]
    return msgspec.structs.replace(chat, messages=messages)


def _with_arguments(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, str) == as_text:
        return call
    if as_text:
        changed = {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
    else:
        location = f"arguments of {function['name']:.40}"
        changed = {**function, "arguments": parse_json(arguments or "{}", dict[str, Any], location)}
    return {**call, "function": changed} if "function" in call else changed


def text_of(message: Message) -> str:
    content = message["content"]
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return str(content)
