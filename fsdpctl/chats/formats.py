"""Parses a row of data, in any published format, into a conversation or plain text.

The first row of a file determines the format of all its rows. Keys that change what is trained on
are followed or rejected. `parse_row` returns the names of all other keys.
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
_QUESTION, _CONTEXT, _ANSWER = (
    ("instruction", "query", "question"), ("input", "context"), ("output", "response"),
)  # fmt: skip
# Names in other data sets for the question and the answer.
_LIKE_QUESTION = (*_QUESTION, "prompt", "input", "problem", "source", "user")
_LIKE_ANSWER = (*_ANSWER, "answer", "completion", "target", "solution", "assistant")
_TEXTS = ("messages", "conversations", "prompt", "completion", "history", "text")
# Keys of rows for other kinds of training.
_PREFERENCE = re.compile(r"(?:chosen|rejected|(?:non_)?preferred_).*")
# Columns that are ignored next to plain text, and rejected in other formats.
_BESIDE_TEXT = {
    **dict.fromkeys(("label", "kto_tag"), "labeled data"),
    **dict.fromkeys(("input_ids", "labels"), "tokens of another program"),
}
_KINDS = {**_BESIDE_TEXT, **dict.fromkeys(MEDIA, "other media than text")}
_TEXT, COLUMN = "text", "the column text"


class Chat(msgspec.Struct, frozen=True, array_like=True, tag="chat"):
    """A conversation to be rendered by a chat template."""

    messages: list[Message]  # as chat templates expect them, with `role` and `content`
    trained: list[bool]  # per message; only used for assistant messages
    tools: list[Any] | None = None
    options: dict[str, Any] = {}  # additional variables of the template
    is_question: bool = False  # render a prompt for the next assistant message


class PlainText(msgspec.Struct, frozen=True, array_like=True, tag="plain"):
    """Text that is trained on without a chat template, followed by the EOS token."""

    text: str
    untrained: int = 0  # masked characters at the beginning
    tokenized_apart: bool = False  # whether masked and trained characters are tokenized apart


class ChatRow(msgspec.Struct, frozen=True, array_like=True):
    """A parsed row, with its location and the keys that are reported."""

    content: Chat | PlainText
    location: str  # file and line
    keys: RowKeys

    def to_bytes(self) -> bytes:
        """Encode the content. Equal contents have equal bytes, whatever the format of the row."""
        return msgspec.msgpack.encode(self.content, order="deterministic")


class _RowFields:
    """The fields of a row, from which those that are used are taken away."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.rest = dict(fields)
        self.keys = RowKeys()

    def one_of(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        """Take the only nonempty field among `keys`; return its key and value ("": all are empty).

        UsageError if two fields have different values.
        """
        nonempty = [(key, value) for key in keys if not is_empty(value := self.rest.pop(key, ""))]
        if any(value != nonempty[0][1] for _, value in nonempty):
            names = f"{nonempty[-1][0]}: conflicts with {nonempty[0][0]}"
            raise UsageError(f"{names}; expected one of them")
        self.keys.followed.update(key for key, _ in nonempty)
        return nonempty[0] if nonempty else (keys[0], "")

    def text(self, *keys: str) -> str:
        """Take the first nonempty text among `keys`; return "" if all are empty."""
        key = next((key for key in keys if not is_empty(self.rest.get(key, ""))), keys[0])
        return expect_text({key: self.rest.pop(key, "")}, key)


def is_used(key: str) -> bool:
    """Return whether a format may use or reject a key of rows."""
    known = {*_TEXTS, *_QUESTION, *_CONTEXT, *_ANSWER, *SYSTEM, *TOOLS, _KWARGS, *LOSS_KEYS}
    is_rejected = key in _KINDS or _PREFERENCE.fullmatch(key) or ROW_LOSS_KEYS.fullmatch(key)
    return key in known or bool(is_rejected)


def detect_format(fields: Mapping[str, Any], prompt: str = TEMPLATE) -> str:
    """Return the format of a file, from the fields of its first row.

    `prompt` is the setting data.prompt, or COLUMN to select the column `text`, whatever other
    columns exist. UsageError if no supported format has these fields.
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
    expected = "messages; conversations; prompt, completion; instruction, input, output; or text"
    names = shorten_list([key[:40] for key in sorted(fields)], 8) or "none"
    raise UsageError(f"unknown format with keys {names}; expected {expected}{_renaming(fields)}")


def _renaming(fields: Mapping[str, Any]) -> str:
    question = next((key for key in _LIKE_QUESTION if key in fields), None)
    answer = next((key for key in _LIKE_ANSWER if key in fields), None)
    if question is None or answer is None:
        hints = (did_you_mean(key[:40], _TEXTS) for key in sorted(fields))
        return next((hint for hint in hints if hint), "")
    pairs = ((question, _QUESTION), (answer, _ANSWER))
    return f"; rename {' and '.join(f'{key} to {to[0]}' for key, to in pairs if key not in to)}"


def parse_row(name: str, fields: Mapping[str, Any]) -> tuple[Chat | PlainText, RowKeys]:
    """Return the content of a row in the format `name`, and the keys that are reported.

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
    content = read(row)
    flag = loss_flag(row.rest, "", ROW_LOSS_KEYS)
    if isinstance(content, PlainText):
        for key in (*SYSTEM, *TOOLS, _KWARGS):
            if not is_empty(row.rest.get(key, "")):
                way = "; to ignore it, set data=text" if name == _TEXT else ""
                raise UsageError(f"{key}: only valid with messages{way}")
    if flag is False:
        if isinstance(content, PlainText):
            raise UsageError("loss: only valid with messages")
        content = msgspec.structs.replace(content, trained=[False] * len(content.trained))
    row.keys.followed.update(row.rest.keys() & set(LOSS_KEYS))
    row.keys.ignored.update(row.rest.keys() - set(LOSS_KEYS))
    return content, row.keys


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
    parts = [row.text(*_QUESTION), row.text(*_CONTEXT)]
    turns = as_list(row.rest.pop("history", []), "history")
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in turns):
        raise UsageError("history: expected pairs of a user and an assistant message")
    turns = [*turns, ["\n".join(part for part in parts if part), row.text(*_ANSWER)]]
    messages: list[Message] = []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": ASSISTANT, "content": answer}]
    return _chat(messages, row)


def _alpaca(row: _RowFields) -> PlainText:
    """Convert a row of Alpaca into its text, as axolotl's `type: alpaca` does.

    Source: axolotl 0.18.0, prompters.py and prompt_tokenizers.py.
    """
    instruction, context, answer = row.text(*_QUESTION), row.text(*_CONTEXT), row.text(*_ANSWER)
    if not is_empty(row.rest.get("history", [])):
        raise UsageError("history: only valid with data.prompt=template")
    if not answer:
        return PlainText("")  # the reader skips empty text
    head = "Below is an instruction that describes a task"
    also = ", paired with an input that provides further context" if context else ""
    task = f"{head}{also}. Write a response that appropriately completes the request."
    parts = [("Instruction", instruction), *([("Input", context)] if context else [])]
    sections = "".join(f"### {name}:\n{text}\n\n" for name, text in parts)
    prompt = f"{task}\n\n{sections}### Response:\n"
    return PlainText(prompt + answer, len(prompt), tokenized_apart=True)


def _plain(row: _RowFields) -> PlainText:
    return PlainText(row.text(_TEXT))  # the reader skips empty text


def _column(fields: Mapping[str, Any]) -> tuple[PlainText, RowKeys]:
    if _TEXT not in fields:
        raise UsageError("text: required, as in the file's first row")
    others = {key for key, value in fields.items() if key != _TEXT and value is not None}
    text = expect_text(without_nulls({_TEXT: fields[_TEXT]}), _TEXT)
    return PlainText(text), RowKeys(ignored=others)


def _messages(row: _RowFields, key: str) -> Chat:
    return _chat(as_list(row.rest.pop(key), key), row)


_Parser = Callable[[_RowFields], Chat | PlainText]
# In the order of detection, by name: the keys that a row must have, and the parser. A tuple of keys
# has synonyms.
_FORMATS: dict[str, tuple[tuple[tuple[str, ...], ...], _Parser]] = {
    "messages": ((("messages",),), lambda row: _messages(row, "messages")),
    "conversations": ((("conversations",),), lambda row: _messages(row, "conversations")),
    "prompt and completion": ((("prompt",), ("completion",)), _prompt),
    "prompt and completion, of messages": ((("prompt",), ("completion",)), _prompt_messages),
    _INSTRUCTION: ((_QUESTION, _ANSWER), _instruction),
    AS_ALPACA: ((_QUESTION, _ANSWER), _alpaca),  # selected by data.prompt=alpaca
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
    key, content = row.one_of(TOOLS)
    tools = [as_object(each, f"{key}: tool {n}") for n, each in enumerate(as_list(content, key), 1)]
    return [_wrapped(tool, f"{key}: tool {n}") for n, tool in enumerate(tools, 1)] or None


def _wrapped(tool: dict[str, Any], location: str) -> dict[str, Any]:
    """Return a tool in the form that templates expect: {"type": "function", "function": …}.

    Tables may have only the function, and its parameters as JSON text.
    """
    function: dict[str, Any] = expect(tool.get("function", tool), dict, f"{location}: function")
    if not isinstance(function.get("parameters", {}), dict):
        parameters = as_object(function["parameters"], f"{location}: parameters")
        function = {**function, "parameters": parameters}
    if "function" in tool:
        return {**tool, "function": function}
    # A built-in tool without a name, or a tool for templates of Cohere.
    if "name" not in tool or "parameter_definitions" in tool:
        return function
    return {"type": "function", "function": {k: v for k, v in function.items() if k != "type"}}
