"""The formats that conversations are published in, made into one.

A file's first line says which it is; every other line has to be of the same.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fsdpctl.data.chats.messages import check_messages, without_nulls
from fsdpctl.data.chats.rows import Chat, Message, Plain, Row
from fsdpctl.errors import UsageError
from fsdpctl.io.documents import parse_json

Fields = Mapping[str, Any]


class FormatError(Exception):
    """A line is not what its format asks for; the message is for the user."""


# Which keys make a format, in the order in which they are looked for.
_KEYS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt and completion": ("prompt", "completion"),
    "prompt and completion, of messages": ("prompt", "completion"),
    "instruction and output": ("instruction", "output"),
    "text": ("text",),
}
KNOWN = "messages; conversations; prompt, completion; instruction, input, output; text"


def recognised(fields: Fields) -> str:
    """The name of the format that a first line has.

    Raises:
        FormatError: none of them.
    """
    for name, keys in _KEYS.items():
        if all(key in fields for key in keys):
            of_messages = isinstance(fields[keys[0]], list)
            return f"{name}, of messages" if keys[0] == "prompt" and of_messages else name
    has = ", ".join(sorted(map(str, fields))[:8]) or "nothing"
    raise FormatError(f"no conversation in it: it has {has}; known are {KNOWN}")


def row_of(name: str, fields: Fields) -> Row:
    """The line with `fields`, read as the format `name`.

    Raises:
        FormatError: it is not of this format, or something in it cannot be trained on.
    """
    fields = without_nulls(fields)
    missing = [key for key in _KEYS[name] if key not in fields]
    if missing:
        raise FormatError(f"no {missing[0]}, which the file's first line has")
    try:
        return _READERS[name](fields)
    except UsageError as error:
        raise FormatError(str(error)) from None


def _messages(fields: Fields) -> Row:
    return _chat(fields["messages"], fields, "messages")


def _conversations(fields: Fields) -> Row:
    return _chat(fields["conversations"], fields, "conversations")


def _prompt(fields: Fields) -> Row:
    prompt, completion = _text(fields, "prompt"), _text(fields, "completion")
    if not completion:
        raise FormatError("completion is empty")
    return Plain(prompt + completion, len(prompt))


def _prompt_messages(fields: Fields) -> Row:
    prompt, completion = (_listed(fields[key], key) for key in ("prompt", "completion"))
    chat = _chat([*prompt, *completion], fields, "prompt")
    first = len(chat.messages) - len(completion)
    trained = [flag and index >= first for index, flag in enumerate(chat.trained)]
    return Chat(chat.messages, trained, chat.tools, chat.options)


def _instruction(fields: Fields) -> Row:
    """Alpaca: the input goes below the instruction."""
    parts = [_text(fields, "instruction"), _text(fields, "input")]
    asked = "\n".join(part for part in parts if part)
    messages: list[Message] = []
    for pair in _listed(fields.get("history", []), "history"):
        if not (isinstance(pair, list) and len(pair) == 2):
            raise FormatError("history: is made of pairs, of a question and an answer")
        messages += (
            {"role": "user", "content": pair[0]},
            {"role": "assistant", "content": pair[1]},
        )
    messages += (
        {"role": "user", "content": asked},
        {"role": "assistant", "content": _text(fields, "output")},
    )
    return _chat(messages, fields, "instruction")


def _plain(fields: Fields) -> Row:
    text = _text(fields, "text")
    if not text:
        raise FormatError("text is empty")
    return Plain(text)


_READERS: dict[str, Callable[[Fields], Row]] = {
    "messages": _messages,
    "conversations": _conversations,
    "prompt and completion": _prompt,
    "prompt and completion, of messages": _prompt_messages,
    "instruction and output": _instruction,
    "text": _plain,
}


def _chat(found: object, fields: Fields, key: str) -> Chat:
    messages = _listed(found, key)
    system = fields.get("system", "")
    if not isinstance(system, str):
        raise FormatError("system: is no text")
    if system:
        messages = [{"role": "system", "content": system}, *messages]
    tools = _listed(fields.get("tools", []), "tools") or None
    options = fields.get("chat_template_kwargs", {})
    if not isinstance(options, dict):
        raise FormatError("chat_template_kwargs: is no object")
    reserved = {"messages", "tools", "add_generation_prompt"} & options.keys()
    if reserved:
        raise FormatError(f"chat_template_kwargs: {sorted(reserved)[0]} is not for it to say")
    checked, trained = check_messages(messages)
    return Chat(checked, trained, tools, options)


def _listed(value: object, key: str) -> list[Any]:
    """A list, or the JSON of one, which tables hold as text."""
    if isinstance(value, str):
        value = without_nulls(parse_json(value, list[Any], key)) if value else []
    if not isinstance(value, list):
        raise FormatError(f"{key}: is no list")
    return value


def _text(fields: Fields, key: str) -> str:
    value = fields.get(key, "")
    if not isinstance(value, str):
        raise FormatError(f"{key}: is no text")
    return value
