"""A row of data, in any published format, as a conversation or plain text.

The first row of a file determines its format; all other rows must have the same one. A key that
changes what is trained on is followed or refused. `parse_row` returns the names of all others.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from fsdpctl.chats.messages import (
    ASSISTANT,
    LOSS_KEYS,
    MEDIA,
    ROW_LOSS_KEYS,
    is_empty,
    loss_flag,
    normalize_messages,
    system_message,
)
from fsdpctl.chats.values import (
    Message,
    RowKeys,
    as_list,
    as_object,
    expect,
    expect_text,
    without_nulls,
)
from fsdpctl.config.data import ALPACA, TEMPLATE
from fsdpctl.errors import UsageError, did_you_mean, shorten_list

SYSTEM = ("system", "system_prompt", "system_message")
TOOLS = ("tools", "functions")
_KWARGS = "chat_template_kwargs"
_RESERVED = {
    "messages", "tools", "add_generation_prompt", "chat_template", "continue_final_message",
}  # fmt: skip
_INSTRUCTION, AS_ALPACA = "instruction and output", "instruction and output, as Alpaca's text"
_ASKED, _ADDED, _ANSWERED = (
    ("instruction", "query", "question"), ("input", "context"), ("output", "response"),
)  # fmt: skip
# What other files call them.
_LIKE_ASKED = (*_ASKED, "prompt", "input", "problem", "source", "user")
_LIKE_ANSWERED = (*_ANSWERED, "answer", "completion", "target", "solution", "assistant")
_TEXTS = ("messages", "conversations", "prompt", "completion", "history", "text")
# Keys of rows for other kinds of training.
_PREFERENCE = re.compile(r"(?:chosen|rejected|(?:non_)?preferred_).*")
_BESIDE_TEXT = {
    **dict.fromkeys(("label", "kto_tag"), "labeled data"),
    **dict.fromkeys(("input_ids", "labels"), "tokens of another program"),
}  # columns that plain text does not need
_KINDS = {**_BESIDE_TEXT, **dict.fromkeys(MEDIA, "other media than text")}
_TEXT, COLUMN = "text", "the column text"


class Chat(msgspec.Struct, frozen=True, array_like=True, tag="chat"):
    """A conversation to be rendered by a chat template."""

    messages: list[Message]  # with `role`; content, tool_calls and others as templates take them
    trained: list[bool]  # per message; matters for assistant messages only
    tools: list[Any] | None = None
    options: dict[str, Any] = {}  # additional variables of the template
    is_question: bool = False  # render a prompt for the next assistant message


class PlainText(msgspec.Struct, frozen=True, array_like=True, tag="plain"):
    """Text that is trained on as it is, followed by the tokenizer's end token."""

    text: str
    untrained: int = 0  # masked characters at the beginning
    tokenized_apart: bool = False  # these and the others are tokenized apart


class ChatRow(msgspec.Struct, frozen=True, array_like=True):
    """A conversation or text, where it was read, and its other keys."""

    content: Chat | PlainText
    location: str  # the location that messages begin with
    keys: RowKeys

    def to_bytes(self) -> bytes:
        """Encode the content. Equal contents have equal bytes, in whatever format they came."""
        return msgspec.msgpack.encode(self.content, order="deterministic")


class _RowFields:
    """The fields of a row, which remember those that were used."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.rest = dict(fields)
        self.keys = RowKeys()

    def one_of(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        """Take the only field of these that is not empty; its value is empty text without any."""
        found = [(key, value) for key in keys if not is_empty(value := self.rest.pop(key, ""))]
        if any(value != found[0][1] for _, value in found):
            raise UsageError(f"{found[-1][0]}: conflicts with {found[0][0]}; expected one of them")
        self.keys.followed.update(key for key, _ in found)
        return found[0] if found else (keys[0], "")

    def text(self, *keys: str) -> str:
        """Take the first text of these that is not empty, if any."""
        key = next((key for key in keys if not is_empty(self.rest.get(key, ""))), keys[0])
        return expect_text({key: self.rest.pop(key, "")}, key)


def is_used(key: str) -> bool:
    """Return whether a format may use a key of rows, or refuse it."""
    known = {*_TEXTS, *_ASKED, *_ADDED, *_ANSWERED, *SYSTEM, *TOOLS, _KWARGS, *LOSS_KEYS, *_KINDS}
    return key in known or bool(_PREFERENCE.fullmatch(key) or ROW_LOSS_KEYS.fullmatch(key))


def detect_format(fields: Mapping[str, Any], prompt: str = TEMPLATE) -> str:
    """Return the format of a file's first row, of which a `text` may be null, with `data.prompt`.

    COLUMN in its place asks for the column `text`, whatever the others are. UsageError if no
    supported format has these fields.
    """
    if prompt == COLUMN and _TEXT in fields:
        return COLUMN
    fields = {k: value for k, value in fields.items() if value is not None or k == _TEXT}
    for name, (keys, _) in _FORMATS.items():
        is_list = keys[0] == ("prompt",) and isinstance(fields.get("prompt"), list)
        if not _missing(keys, fields) and is_list == name.endswith("of messages"):
            _check_kind(fields, name)
            return AS_ALPACA if (name, prompt) == (_INSTRUCTION, ALPACA) else name
    _check_kind(fields, "")
    known = "messages; conversations; prompt, completion; instruction, input, output; or text"
    has = shorten_list([key[:40] for key in sorted(fields)], 8) or "none"
    raise UsageError(f"unknown format with keys {has}; expected {known}{_renaming(fields)}")


def _renaming(fields: Mapping[str, Any]) -> str:
    asked = next((key for key in _LIKE_ASKED if key in fields), None)
    answered = next((key for key in _LIKE_ANSWERED if key in fields), None)
    if asked is None or answered is None:
        hints = (did_you_mean(key[:40], _TEXTS) for key in sorted(fields))
        return next((hint for hint in hints if hint), "")
    pairs = ((asked, _ASKED), (answered, _ANSWERED))
    return f"; rename {' and '.join(f'{key} to {to[0]}' for key, to in pairs if key not in to)}"


def parse_row(name: str, fields: Mapping[str, Any]) -> tuple[Chat | PlainText, RowKeys]:
    """Return the content of a row in the format `name`, and the names of the keys besides it.

    UsageError if the row has another format, or can't be trained on.
    """
    if name == COLUMN:
        return _column(fields)
    _check_kind(fields, name)
    empty = {_TEXT: ""} if name == _TEXT and _TEXT in fields else {}
    fields = empty | without_nulls(fields)
    keys, read = _FORMATS[name]
    if missing := _missing(keys, fields):
        raise UsageError(f"{missing}: required, as in the file's first row")
    row = _RowFields(fields)
    found = read(row)
    flag = loss_flag(row.rest, "", ROW_LOSS_KEYS)
    if isinstance(found, PlainText):
        for key in (*SYSTEM, *TOOLS, _KWARGS):
            if not is_empty(row.rest.get(key, "")):
                way = "; to ignore it, set data=text" if name == _TEXT else ""
                raise UsageError(f"{key}: only valid with messages{way}")
    if flag is False:
        if isinstance(found, PlainText):
            raise UsageError("loss: only valid with messages")
        found = msgspec.structs.replace(found, trained=[False] * len(found.trained))
    row.keys.followed.update(row.rest.keys() & set(LOSS_KEYS))
    row.keys.ignored.update(row.rest.keys() - set(LOSS_KEYS))
    return found, row.keys


def _missing(keys: tuple[tuple[str, ...], ...], fields: Mapping[str, Any]) -> str:
    return next((each[0] for each in keys if not any(key in fields for key in each)), "")


def _check_kind(fields: Mapping[str, Any], name: str) -> None:
    for key, value in fields.items():
        if name == _TEXT and key in _BESIDE_TEXT:
            continue
        kind = "preference data" if _PREFERENCE.fullmatch(key) else _KINDS.get(key)
        if kind and value is not None and not is_empty(value):
            way = ", or set data=text" if _TEXT in fields else ""
            raise UsageError(f"{key}: {kind}: not supported; remove the key to ignore it{way}")


def _prompt(row: _RowFields) -> PlainText:
    prompt, completion = row.text("prompt"), row.text("completion")
    if not completion:
        raise UsageError("completion: empty; expected text")
    return PlainText(prompt + completion, len(prompt))


def _prompt_messages(row: _RowFields) -> Chat:
    prompt, completion = (as_list(row.rest.pop(key), key) for key in ("prompt", "completion"))
    chat = _chat([*prompt, *completion], row)
    first = len(chat.messages) - len(completion)
    trained = [flag and index >= first for index, flag in enumerate(chat.trained)]
    return msgspec.structs.replace(chat, trained=trained)


def _instruction(row: _RowFields) -> Chat:
    """Convert a row of Alpaca: the input follows the instruction in the user's message."""
    parts = [row.text(*_ASKED), row.text(*_ADDED)]
    turns = as_list(row.rest.pop("history", []), "history")
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in turns):
        raise UsageError("history: expected pairs of a user and an assistant message")
    turns = [*turns, ["\n".join(part for part in parts if part), row.text(*_ANSWERED)]]
    messages: list[Message] = []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": ASSISTANT, "content": answer}]
    return _chat(messages, row)


def _alpaca(row: _RowFields) -> PlainText:
    """Convert a row of Alpaca into its text, as axolotl's `type: alpaca` does.

    Source: axolotl 0.18.0, prompters.py and prompt_tokenizers.py.
    """
    asked, added, answer = row.text(*_ASKED), row.text(*_ADDED), row.text(*_ANSWERED)
    if not is_empty(row.rest.get("history", [])):
        raise UsageError("history: only valid with data.prompt=template")
    if not answer:
        return PlainText("")  # passed over by the reader
    head = "Below is an instruction that describes a task"
    more = ", paired with an input that provides further context" if added else ""
    task = f"{head}{more}. Write a response that appropriately completes the request."
    parts = [("Instruction", asked), *([("Input", added)] if added else [])]
    sections = "".join(f"### {name}:\n{text}\n\n" for name, text in parts)
    prompt = f"{task}\n\n{sections}### Response:\n"
    return PlainText(prompt + answer, len(prompt), tokenized_apart=True)


def _plain(row: _RowFields) -> PlainText:
    return PlainText(row.text(_TEXT))  # empty: passed over by the reader


def _column(fields: Mapping[str, Any]) -> tuple[PlainText, RowKeys]:
    if _TEXT not in fields:
        raise UsageError("text: required, as in the file's first row")
    others = {key for key, value in fields.items() if key != _TEXT and value is not None}
    text = expect_text(without_nulls({_TEXT: fields[_TEXT]}), _TEXT)
    return PlainText(text), RowKeys(ignored=others)


def _messages(row: _RowFields, key: str) -> Chat:
    return _chat(as_list(row.rest.pop(key), key), row)


# By name: the keys that a row must have, in the order of detection, and the function that reads it
_FORMATS: dict[
    str, tuple[tuple[tuple[str, ...], ...], Callable[[_RowFields], Chat | PlainText]]
] = {
    "messages": ((("messages",),), lambda row: _messages(row, "messages")),
    "conversations": ((("conversations",),), lambda row: _messages(row, "conversations")),
    "prompt and completion": ((("prompt",), ("completion",)), _prompt),
    "prompt and completion, of messages": ((("prompt",), ("completion",)), _prompt_messages),
    _INSTRUCTION: ((_ASKED, _ANSWERED), _instruction),
    AS_ALPACA: ((_ASKED, _ANSWERED), _alpaca),  # in place of the format with these keys
    _TEXT: (((_TEXT,),), _plain),
}


def _chat(messages: list[Any], row: _RowFields) -> Chat:
    checked, trained = normalize_messages(messages, row.keys)
    key, system = row.one_of(SYSTEM)
    first = system_message(str(expect(system, str, key)), checked, key)
    options = as_object(row.one_of((_KWARGS,))[1] or {}, _KWARGS)
    if reserved := _RESERVED & options.keys():
        raise UsageError(f"{_KWARGS}: {sorted(reserved)[0]} is set by fsdpctl")
    return Chat([*first, *checked], [True] * len(first) + trained, _tools(row), options)


def _tools(row: _RowFields) -> list[Any] | None:
    key, found = row.one_of(TOOLS)
    tools = [as_object(each, f"{key}: tool {n}") for n, each in enumerate(as_list(found, key), 1)]
    return [_wrapped(tool, f"{key}: tool {n}") for n, tool in enumerate(tools, 1)] or None


def _wrapped(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tool in the form that templates expect: its function within an object with a type.

    Tables have the function alone, and its parameters as JSON.
    """
    function: dict[str, Any] = expect(tool.get("function", tool), dict, f"{where}: function")
    if not isinstance(function.get("parameters", {}), dict):
        parameters = as_object(function["parameters"], f"{where}: parameters")
        function = {**function, "parameters": parameters}
    if "function" in tool:
        return {**tool, "function": function}
    if "name" not in tool or "parameter_definitions" in tool:  # built-in; of Cohere's templates
        return function
    return {"type": "function", "function": {k: v for k, v in function.items() if k != "type"}}
