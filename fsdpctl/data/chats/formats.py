"""One line of data, in any published format, as a conversation or plain text.

The first line of a file determines its format; all other lines must have the same one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from fsdpctl.errors import UsageError, nearest
from fsdpctl.io.documents import parse_json

Message = dict[str, Any]
Fields = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ASSISTANT = "assistant"
REASONING = ("reasoning_content", "thinking", "reasoning")
_CALL = "function_call"
_ROLE_SYNONYMS = {
    "human": "user", "input": "user",
    "gpt": ASSISTANT, "model": ASSISTANT, "output": ASSISTANT, "bot": ASSISTANT,
    "chatgpt": ASSISTANT, _CALL: ASSISTANT,
    "observation": "tool", "ipython": "tool",
}  # fmt: skip
_FLAGS = ("weight", "train")
_TYPES: dict[type, str] = {str: "text", list: "a list", dict: "a JSON object", bool: "a Boolean"}


class Chat(msgspec.Struct, frozen=True, array_like=True, tag="chat"):
    """A conversation to be rendered by a chat template."""

    messages: list[Message]  # with `role`; content, tool_calls and others as templates take them
    trained: list[bool]  # per message; matters for assistant messages only
    tools: list[Any] | None = None
    options: dict[str, Any] = {}  # additional variables of the template
    is_question: bool = False  # render a prompt for the next assistant message


class Plain(msgspec.Struct, frozen=True, array_like=True, tag="plain"):
    """Text that is trained on as it is, followed by the tokenizer's end token."""

    text: str
    untrained: int = 0  # masked characters at the beginning


class ChatLine(msgspec.Struct, frozen=True, array_like=True):
    """A conversation or text, and the line that it was read from."""

    content: Chat | Plain
    file: str
    number: int

    @property
    def where(self) -> str:
        """The location that messages begin with."""
        return f"{self.file}, line {self.number}"

    def to_bytes(self) -> bytes:
        """Encode the content. Equal contents have equal bytes, in whatever format they came."""
        return msgspec.msgpack.encode(self.content, order="deterministic")


def detect_format(fields: Fields) -> str:
    """Return the name of the format of a file's first line.

    Raises:
        UsageError: If no supported format has these fields.
    """
    for name, (keys, _) in _FORMATS.items():
        is_list = keys[0] == "prompt" and isinstance(fields.get("prompt"), list)
        if all(key in fields for key in keys) and is_list == name.endswith("of messages"):
            return name
    known = "messages; conversations; prompt, completion; instruction, input, output; or text"
    has = ", ".join(sorted(map(str, fields))[:8]) or "none"
    raise UsageError(f"unknown format with keys {has}; expected {known}")


def parse_line(name: str, fields: Fields) -> Chat | Plain:
    """Convert the fields of a line in the format `name`.

    Raises:
        UsageError: If the line has another format, or can't be trained on.
    """
    fields = _without_nulls(fields)
    keys, read = _FORMATS[name]
    missing = [key for key in keys if key not in fields]
    if missing:
        raise UsageError(f"{missing[0]}: required, as in the file's first line")
    return read(fields)


def _without_nulls(value: Any) -> Any:
    """Drop null fields at any depth: Parquet and similar tables fill missing fields with null."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def _prompt(fields: Fields) -> Plain:
    prompt, completion = _text(fields, "prompt"), _text(fields, "completion")
    if not completion:
        raise UsageError("completion: empty; expected text")
    return Plain(prompt + completion, len(prompt))


def _prompt_messages(fields: Fields) -> Chat:
    prompt, completion = (_list(fields[key], key) for key in ("prompt", "completion"))
    chat = _chat([*prompt, *completion], fields, "prompt")
    first = len(chat.messages) - len(completion)
    trained = [flag and index >= first for index, flag in enumerate(chat.trained)]
    return msgspec.structs.replace(chat, trained=trained)


def _instruction(fields: Fields) -> Chat:
    """Convert a line of Alpaca: the input follows the instruction in the user's message."""
    parts = [_text(fields, "instruction"), _text(fields, "input")]
    turns = _list(fields.get("history", []), "history")
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in turns):
        raise UsageError("history: expected pairs of a user and an assistant message")
    turns = [*turns, ["\n".join(part for part in parts if part), _text(fields, "output")]]
    messages: list[Message] = []
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": ASSISTANT, "content": answer})
    return _chat(messages, fields, "instruction")


def _plain(fields: Fields) -> Plain:
    if not (text := _text(fields, "text")):
        raise UsageError("text: empty; expected text")
    return Plain(text)


# By name: the keys that a line must have, in the order of detection, and the function that reads it
_FORMATS: dict[str, tuple[tuple[str, ...], Callable[[Fields], Chat | Plain]]] = {
    "messages": (("messages",), lambda fields: _chat(fields["messages"], fields, "messages")),
    "conversations": (
        ("conversations",),
        lambda fields: _chat(fields["conversations"], fields, "conversations"),
    ),
    "prompt and completion": (("prompt", "completion"), _prompt),
    "prompt and completion, of messages": (("prompt", "completion"), _prompt_messages),
    "instruction and output": (("instruction", "output"), _instruction),
    "text": (("text",), _plain),
}


def _chat(found: object, fields: Fields, key: str) -> Chat:
    messages = _list(found, key)
    if system := _text(fields, "system"):
        messages = [{"role": "system", "content": system}, *messages]
    tools = _list(fields.get("tools", []), "tools") or None
    options = _expect(fields.get("chat_template_kwargs", {}), dict, "chat_template_kwargs")
    reserved = {"messages", "tools", "add_generation_prompt"} & options.keys()
    if reserved:
        raise UsageError(f"chat_template_kwargs: {sorted(reserved)[0]} is set by fsdpctl")
    checked, trained = _check_messages(messages)
    return Chat(checked, trained, tools, options)


def _expect(value: Any, kind: type, where: str) -> Any:
    if isinstance(value, kind):
        return value
    got = _TYPES.get(type(value), "a number")
    raise UsageError(f"{where}: expected {_TYPES[kind]}, got {got}")


def _list(value: object, key: str) -> list[Any]:
    """Return a list, decoded from JSON if it is text, as in some tables."""
    if isinstance(value, str):
        value = _without_nulls(parse_json(value, list[Any], key)) if value else []
    found: list[Any] = _expect(value, list, key)
    return found


def _text(fields: Fields, key: str) -> str:
    return str(_expect(fields.get(key, ""), str, key))


def _check_messages(messages: Sequence[Any]) -> tuple[list[Message], list[bool]]:
    """Return the messages with normalized names, and which of them may be trained on."""
    if not messages:
        raise UsageError("the conversation has no messages")
    checked, trained = [], []
    for number, message in enumerate(messages, start=1):
        where = f"message {number}"
        renamed = _renamed(_expect(message, dict, where), where)
        trained.append(_is_trained(renamed, where))
        checked.append({key: value for key, value in renamed.items() if key not in _FLAGS})
        _check_content(checked[-1], where)
    if all(each["role"] != ASSISTANT for each in checked):
        raise UsageError("the conversation has no assistant message to train on")
    return checked, trained


def _renamed(message: Message, where: str) -> Message:
    """Return the message with `role` and `content`, also if it has `from` and `value`."""
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    role = message.get("role", message.get("from"))
    if "content" not in rest and "value" in message:
        rest["content"] = message["value"]
    known = _ROLE_SYNONYMS.get(role, role) if isinstance(role, str) else None
    if known not in ROLES:
        problem = "role: required" if role is None else f"role {role!s:.40}: not supported"
        hint = nearest(role, (*ROLES, *_ROLE_SYNONYMS)) if isinstance(role, str) else ""
        raise UsageError(f"{where}: {problem}; expected {', '.join(ROLES)}{hint}")
    if role == _CALL and isinstance(rest.get("content"), str):
        call = parse_json(rest.pop("content"), dict[str, Any], f"{where}: {_CALL}")
        rest["tool_calls"] = [{"type": "function", "function": call}]
    return {"role": known, **{key: value for key, value in rest.items() if key != "role"}}


def _is_trained(message: Message, where: str) -> bool:
    weight, train = message.get("weight", 1), message.get("train", True)
    if weight not in (0, 1):
        raise UsageError(f"{where}: weight {weight!s:.20}: expected 0 or 1")
    if not isinstance(train, bool):
        raise UsageError(f"{where}: train {train!s:.20}: expected true or false")
    return bool(weight) and train


def _check_content(message: Message, where: str) -> None:
    content = message.get("content", "")
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise UsageError(
                    f"{where}: part of type {kind!s:.40}: not supported; expected text"
                )
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise UsageError(f"{where}: content: expected text or a list of parts")
    _check_calls(message, where)
    for name in REASONING:
        _expect(message.get(name, ""), str, f"{where}: {name}")
    has_more = message.get("tool_calls") or any(message.get(name) for name in REASONING)
    may_be_empty = message["role"] in ("system", "developer", "tool", "function") or has_more
    if not content.strip() and not may_be_empty:
        raise UsageError(f"{where}: content: empty; required for role {message['role']}")
    message.setdefault("content", "")


def _check_calls(message: Message, where: str) -> None:
    calls = _expect(message.get("tool_calls", []), list, f"{where}: tool_calls")
    if calls and message["role"] != ASSISTANT:
        raise UsageError(f"{where}: tool_calls: only valid with role {ASSISTANT}")
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else {}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UsageError(f"{where}: tool_calls: the function's name is required")
        if not isinstance(function.get("arguments", {}), str | dict):
            raise UsageError(f"{where}: arguments of {function['name']:.40}: expected an object")
