"""Parses a row of data, in any published format, into a conversation or plain text.

The first row of a file determines the format of all its rows. Keys that change what is trained on
are followed or rejected, all others ignored. `parse_row` names the followed and the ignored keys.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from fsdpctl.chats.messages import (
    ASSISTANT,
    LOSS_KEYS,
    MEDIA,
    ROW_LOSS_LIKE_KEYS,
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
from fsdpctl.config.data import PROMPT_ALPACA, PROMPT_TEMPLATE
from fsdpctl.errors import UsageError, did_you_mean, shorten_list

SYSTEM_KEYS = ("system", "system_prompt", "system_message")
TOOLS_KEYS = ("tools", "functions")
_KWARGS_KEY = "chat_template_kwargs"
_RESERVED_VARIABLES = {
    "messages", "tools", "add_generation_prompt", "chat_template", "continue_final_message",
}  # fmt: skip
# TEXT_COLUMN is a format that reads only the key `text`. A caller selects it by `prompt`.
_TEXT_FORMAT, TEXT_COLUMN = "text", "the column text"
_INSTRUCTION_FORMAT = "instruction and output"
ALPACA_FORMAT = f"{_INSTRUCTION_FORMAT}, as Alpaca's text"
_INSTRUCTION_KEYS = ("instruction", "query", "question")
_INPUT_KEYS, _OUTPUT_KEYS = ("input", "context"), ("output", "response")
# Keys that a hint suggests to rename.
_SIMILAR_TO_INSTRUCTION = (*_INSTRUCTION_KEYS, "prompt", "input", "problem", "source", "user")
_SIMILAR_TO_OUTPUT = (*_OUTPUT_KEYS, "answer", "completion", "target", "solution", "assistant")
_FORMAT_KEYS = ("messages", "conversations", "prompt", "completion", "history", "text")
# Keys of rows for other kinds of training.
_PREFERENCE = re.compile(r"(?:chosen|rejected|(?:non_)?preferred_).*")
# Keys that are ignored next to plain text, and rejected in other formats.
_IGNORED_WITH_TEXT = {
    **dict.fromkeys(("label", "kto_tag"), "labeled data"),
    **dict.fromkeys(("input_ids", "labels"), "tokens of another program"),
}
_UNSUPPORTED_KEYS = {**_IGNORED_WITH_TEXT, **dict.fromkeys(MEDIA, "other media than text")}
_TEXT_KEY = "text"


class Chat(msgspec.Struct, frozen=True, array_like=True, tag="chat"):
    """The messages of a conversation, in the form of chat templates."""

    messages: list[Message]  # with `role` and `content`
    trained: list[bool]  # per message; only used for assistant messages
    tools: list[Any] | None = None
    options: dict[str, Any] = {}  # additional variables of the template
    add_generation_prompt: bool = False  # render a prompt for the next assistant message


class PlainText(msgspec.Struct, frozen=True, array_like=True, tag="plain"):
    """Text that is trained on without a chat template, followed by the EOS token."""

    text: str
    num_masked_chars: int = 0  # masked characters at the beginning
    tokenized_separately: bool = False  # whether masked and trained characters share no token


class ChatRow(msgspec.Struct, frozen=True, array_like=True):
    """A parsed row, with its location and the keys that are reported."""

    content: Chat | PlainText
    location: str  # file and line
    keys: RowKeys

    def to_bytes(self) -> bytes:
        """Encode the content. Equal contents have equal bytes, whatever the format of the row."""
        return msgspec.msgpack.encode(self.content, order="deterministic")


class _RowFields:
    """The fields of a row, from which parsers take the fields that they use."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.unused = dict(fields)
        self.keys = RowKeys()

    def take_only(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        """Take the only nonempty field among `keys`, and report it as followed.

        Returns its key and value, or a key and "".

        UsageError if two fields have different values.
        """
        nonempty = [(key, value) for key in keys if not is_empty(value := self.unused.pop(key, ""))]
        if any(value != nonempty[0][1] for _, value in nonempty):
            problem = f"{nonempty[-1][0]}: conflicts with {nonempty[0][0]}"
            raise UsageError(f"{problem}; expected one of them")
        self.keys.followed.update(key for key, _ in nonempty)
        return nonempty[0] if nonempty else (keys[0], "")

    def take_text(self, *keys: str) -> str:
        """Take the first nonempty text among `keys`; return "" if all are empty."""
        key = next((key for key in keys if not is_empty(self.unused.get(key, ""))), keys[0])
        return expect_text({key: self.unused.pop(key, "")}, key)


def needs_value(key: str) -> bool:
    """Return whether a format uses the value of a row's key, or rejects rows because of it."""
    used = {*_FORMAT_KEYS, *_INSTRUCTION_KEYS, *_INPUT_KEYS, *_OUTPUT_KEYS, *LOSS_KEYS}
    used |= {*SYSTEM_KEYS, *TOOLS_KEYS, _KWARGS_KEY, *_UNSUPPORTED_KEYS}
    return key in used or any(x.fullmatch(key) for x in (_PREFERENCE, ROW_LOSS_LIKE_KEYS))


def detect_format(fields: Mapping[str, Any], prompt: str = PROMPT_TEMPLATE) -> str:
    """Return the format of a file, from the fields of its first row.

    `prompt` is the setting data.prompt, or TEXT_COLUMN to select the key `text`, whatever other
    keys exist. UsageError if no supported format has these fields.
    """
    if prompt == TEXT_COLUMN and _TEXT_KEY in fields:
        return TEXT_COLUMN
    fields = {k: value for k, value in fields.items() if value is not None or k == _TEXT_KEY}
    for format_name, (keys, _) in _FORMATS.items():
        # Two formats have the keys prompt and completion: of texts, or of messages.
        is_list = keys[0] == ("prompt",) and isinstance(fields.get("prompt"), list)
        if not _missing(keys, fields) and is_list == format_name.endswith("of messages"):
            _check_supported(fields, format_name)
            is_alpaca = (format_name, prompt) == (_INSTRUCTION_FORMAT, PROMPT_ALPACA)
            return ALPACA_FORMAT if is_alpaca else format_name
    _check_supported(fields, "")
    expected = "messages; conversations; prompt, completion; instruction, input, output; or text"
    names = shorten_list([key[:40] for key in sorted(fields)], 8) or "none"
    raise UsageError(f"unknown format with keys {names}; expected {expected}{_rename_hint(fields)}")


def _rename_hint(fields: Mapping[str, Any]) -> str:
    question = next((key for key in _SIMILAR_TO_INSTRUCTION if key in fields), None)
    answer = next((key for key in _SIMILAR_TO_OUTPUT if key in fields), None)
    if question is None or answer is None:
        hints = (did_you_mean(key[:40], _FORMAT_KEYS) for key in sorted(fields))
        return next((hint for hint in hints if hint), "")
    pairs = ((question, _INSTRUCTION_KEYS), (answer, _OUTPUT_KEYS))
    return f"; rename {' and '.join(f'{key} to {to[0]}' for key, to in pairs if key not in to)}"


def parse_row(format_name: str, fields: Mapping[str, Any]) -> tuple[Chat | PlainText, RowKeys]:
    """Return the content of a row in the format `format_name`, and the keys that are reported.

    UsageError if the row has another format, or can't be trained on.
    """
    if format_name == TEXT_COLUMN:
        return _parse_column(fields)
    _check_supported(fields, format_name)
    # A null text is an empty text.
    empty = {_TEXT_KEY: ""} if format_name == _TEXT_FORMAT and _TEXT_KEY in fields else {}
    fields = empty | without_nulls(fields)
    keys, parse = _FORMATS[format_name]
    if missing := _missing(keys, fields):
        raise UsageError(f"{missing}: required, as in the file's first row")
    row = _RowFields(fields)
    content = parse(row)
    flag = loss_flag(row.unused, "", ROW_LOSS_LIKE_KEYS)
    if isinstance(content, PlainText):
        for key in (*SYSTEM_KEYS, *TOOLS_KEYS, _KWARGS_KEY):
            if not is_empty(row.unused.get(key, "")):
                hint = "; to ignore it, set data=text" if format_name == _TEXT_FORMAT else ""
                raise UsageError(f"{key}: only valid with messages{hint}")
        if flag is False:
            raise UsageError("loss: only valid with messages")
    elif flag is False:
        content = msgspec.structs.replace(content, trained=[False] * len(content.trained))
    row.keys.followed.update(row.unused.keys() & set(LOSS_KEYS))
    row.keys.ignored.update(row.unused.keys() - set(LOSS_KEYS))
    return content, row.keys


def _missing(keys: tuple[tuple[str, ...], ...], fields: Mapping[str, Any]) -> str:
    return next((each[0] for each in keys if not any(key in fields for key in each)), "")


def _check_supported(fields: Mapping[str, Any], format_name: str) -> None:
    for key, value in fields.items():
        if format_name == _TEXT_FORMAT and key in _IGNORED_WITH_TEXT:
            continue
        kind = "preference data" if _PREFERENCE.fullmatch(key) else _UNSUPPORTED_KEYS.get(key)
        if kind and value is not None and not is_empty(value):
            hint = ", or set data=text" if _TEXT_KEY in fields else ""
            raise UsageError(f"{key}: {kind}: not supported; remove the key to ignore it{hint}")


def _parse_prompt(row: _RowFields) -> PlainText:
    prompt, completion = row.take_text("prompt"), row.take_text("completion")
    if not completion:
        raise UsageError("completion: empty; expected text")
    return PlainText(prompt + completion, len(prompt))


def _parse_prompt_messages(row: _RowFields) -> Chat:
    prompt, completion = (as_list(row.unused.pop(key), key) for key in ("prompt", "completion"))
    chat = _chat([*prompt, *completion], row)
    first = len(chat.messages) - len(completion)
    trained = [flag and index >= first for index, flag in enumerate(chat.trained)]
    return msgspec.structs.replace(chat, trained=trained)


def _parse_instruction(row: _RowFields) -> Chat:
    """Convert a row of Alpaca: the input follows the instruction in the user's message."""
    texts = [row.take_text(*_INSTRUCTION_KEYS), row.take_text(*_INPUT_KEYS)]
    turns = as_list(row.unused.pop("history", []), "history")
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in turns):
        raise UsageError("history: expected pairs of a user and an assistant message")
    turns = [*turns, ["\n".join(text for text in texts if text), row.take_text(*_OUTPUT_KEYS)]]
    messages: list[Message] = []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": ASSISTANT, "content": answer}]
    return _chat(messages, row)


def _parse_alpaca(row: _RowFields) -> PlainText:
    """Convert a row of Alpaca to text as axolotl 0.18.0's prompters and prompt_tokenizers do."""
    keys = _INSTRUCTION_KEYS, _INPUT_KEYS, _OUTPUT_KEYS
    instruction, context, answer = (row.take_text(*each) for each in keys)
    if not is_empty(row.unused.get("history", [])):
        raise UsageError("history: only valid with data.prompt=template")
    if not answer:
        return PlainText("")  # the reader skips empty text
    head = "Below is an instruction that describes a task"
    also = ", paired with an input that provides further context" if context else ""
    task = f"{head}{also}. Write a response that appropriately completes the request."
    parts = [("Instruction", instruction), *([("Input", context)] if context else [])]
    sections = "".join(f"### {name}:\n{text}\n\n" for name, text in parts)
    prompt = f"{task}\n\n{sections}### Response:\n"
    return PlainText(prompt + answer, len(prompt), tokenized_separately=True)


def _parse_column(fields: Mapping[str, Any]) -> tuple[PlainText, RowKeys]:
    if _TEXT_KEY not in fields:
        raise UsageError("text: required, as in the file's first row")
    others = {key for key, value in fields.items() if key != _TEXT_KEY and value is not None}
    text = expect_text(without_nulls({_TEXT_KEY: fields[_TEXT_KEY]}), _TEXT_KEY)
    return PlainText(text), RowKeys(ignored=others)


def _parse_messages(row: _RowFields, key: str) -> Chat:
    return _chat(as_list(row.unused.pop(key), key), row)


_Parser = Callable[[_RowFields], Chat | PlainText]
# The required keys (tuples of synonyms) and the parser of each format, in the order of detection.
_FORMATS: dict[str, tuple[tuple[tuple[str, ...], ...], _Parser]] = {
    "messages": ((("messages",),), lambda row: _parse_messages(row, "messages")),
    "conversations": ((("conversations",),), lambda row: _parse_messages(row, "conversations")),
    "prompt and completion": ((("prompt",), ("completion",)), _parse_prompt),
    "prompt and completion, of messages": ((("prompt",), ("completion",)), _parse_prompt_messages),
    _INSTRUCTION_FORMAT: ((_INSTRUCTION_KEYS, _OUTPUT_KEYS), _parse_instruction),
    # Selected by data.prompt=alpaca.
    ALPACA_FORMAT: ((_INSTRUCTION_KEYS, _OUTPUT_KEYS), _parse_alpaca),
    _TEXT_FORMAT: (((_TEXT_KEY,),), lambda row: PlainText(row.take_text(_TEXT_KEY))),
}


def _chat(messages: list[Any], row: _RowFields) -> Chat:
    checked, trained = normalize_messages(messages, row.keys)
    key, system = row.take_only(SYSTEM_KEYS)
    first = system_message(str(expect(system, str, key)), checked, key)
    options = as_object(row.take_only((_KWARGS_KEY,))[1] or {}, _KWARGS_KEY)
    if reserved := _RESERVED_VARIABLES & options.keys():
        raise UsageError(f"{_KWARGS_KEY}: {sorted(reserved)[0]} is set by fsdpctl")
    return Chat([*first, *checked], [True] * len(first) + trained, _tools(row), options)


def _tools(row: _RowFields) -> list[Any] | None:
    key, content = row.take_only(TOOLS_KEYS)
    tools = [as_object(each, f"{key}: tool {n}") for n, each in enumerate(as_list(content, key), 1)]
    return [_wrap_tool(tool, f"{key}: tool {n}") for n, tool in enumerate(tools, 1)] or None


def _wrap_tool(tool: dict[str, Any], location: str) -> dict[str, Any]:
    """Return a tool in the form that templates expect: {"type": "function", "function": …}.

    A tool may be only the function, and its parameters may be JSON text, as in Parquet files.
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
