"""Normalizes the messages of a row: roles, content, tool calls and loss flags of other programs."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fsdpctl.chats.values import Message, RowKeys, as_list, as_object, expect, expect_text
from fsdpctl.errors import UsageError, did_you_mean
from fsdpctl.io.untrusted import parse_json

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ASSISTANT = "assistant"
REASONING = ("reasoning_content", "thinking", "reasoning")
MEDIA = ("image", "images", "video", "videos", "audio", "audios", "objects")
_UNSUPPORTED_KEYS = {*MEDIA, "refusal"}
_CALL_KEYS = ("function_call", "tool_call", "tool_calls")
_ROLE_SYNONYMS = {
    **dict.fromkeys(("human", "input", "prompter"), "user"),
    **dict.fromkeys(("gpt", "model", "output", "bot", "chatgpt", "ai", "chatbot"), ASSISTANT),
    **dict.fromkeys(_CALL_KEYS, ASSISTANT),
    **dict.fromkeys(("observation", "observations", "ipython", "tool_response"), "tool"),
    **dict.fromkeys(("tool_result", "function_response"), "tool"),
}
LOSS_KEYS = ("weight", "train", "training", "loss", "loss_scale")
# Other keys that look like loss flags: a pattern for messages, and a list for rows, which also have
# metadata such as `train_split`.
_LOSS_LIKE_KEYS = re.compile(r"(?:.*_)?(?:loss|train(?:ing|able|ed)?|weights?|mask(?:ed)?)(?:_.*)?")
ROW_LOSS_LIKE_KEYS = re.compile(
    r"(?:loss|sample|attention)_(?:mask|weight)s?|masks?|weights|train_on_inputs?|train(?:ing)?_detail"
)
_USED_KEYS = {
    "message": {"role", "content", "tool_calls", *REASONING},
    "part": {"type", "text"},
    "call": {"type", "function"},
    "function": {"name", "arguments"},
}
_NOT_LOSS_KEYS = _USED_KEYS["message"] | _USED_KEYS["part"]
_SIMILAR_TO_ARGUMENTS = ("parameters", "args", "kwargs", "input")


def normalize_messages(messages: Sequence[Any], keys: RowKeys) -> tuple[list[Message], list[bool]]:
    """Return the messages with normalized names, and for each whether it may be trained on.

    Adds to `keys` the paths of loss flags, and of keys that only a template may use. UsageError if
    no message can be trained on, or if a key is not supported.
    """
    if not messages:
        raise UsageError("the conversation has no messages")
    checked, trained = list[Message](), list[bool]()
    for number, message in enumerate(messages, start=1):
        location = f"message {number}"
        raw_role = expect(message, dict, location).get("role", message.get("from"))
        role_name = str(raw_role).lower().replace("-", "_")
        renamed = _rename_keys(message, role_name, location)
        flag = loss_flag(renamed, f"{location}: ")
        if flag and renamed["role"] != ASSISTANT:
            key = next(key for key in LOSS_KEYS if key in renamed)
            raise UsageError(f"{location}: {key}: only valid with role {ASSISTANT}")
        for key in renamed.keys() & set(LOSS_KEYS):
            keys.followed.add(f"messages[].{key}")
            del renamed[key]
        _normalize_content(renamed, location)
        keys.ignored.update(_ignored_paths(renamed))
        # Some data has a message per call: add it to the assistant message.
        if role_name in _CALL_KEYS and checked and checked[-1]["role"] == ASSISTANT:
            if flag not in (None, trained[-1]):
                raise UsageError(f"{location}: loss: conflicts with message {number - 1}")
            calls = [*checked[-1].get("tool_calls", []), *renamed["tool_calls"]]
            checked[-1] = {**checked[-1], "tool_calls": calls}
            continue
        checked.append(renamed)
        trained.append(flag is not False)
    if all(each["role"] != ASSISTANT for each in checked):
        raise UsageError("the conversation has no assistant message to train on")
    return checked, trained


def loss_flag(
    fields: Mapping[str, Any], location: str, others: re.Pattern[str] = _LOSS_LIKE_KEYS
) -> bool | None:
    """Return the loss flag of a message or row, None without a flag.

    UsageError if a flag is neither 0 nor 1, or if another key matches the pattern `others`.
    """
    flag = None
    for key, value in fields.items():
        if key in LOSS_KEYS:
            if isinstance(value, str) or value not in (0, 1):
                problem = "not supported; expected true, false, 0 or 1"
                raise UsageError(f"{location}{key} {value!s:.20}: {problem}")
            flag = bool(value) and flag is not False  # all flags must be true
        elif key not in _NOT_LOSS_KEYS and others.fullmatch(key) and not is_empty(value):
            raise UsageError(f"{location}{key}: not supported; expected {', '.join(LOSS_KEYS)}")
    return flag


def is_empty(value: object) -> bool:
    """Return whether a text, list or object is empty; tables fill missing keys with these."""
    return isinstance(value, str | list | dict) and not value


def system_message(text: str, messages: Sequence[Message], key: str) -> list[Message]:
    """Return a list with the message for a row's system text; empty if `messages` begin with it.

    UsageError if `messages` begin with another system message.
    """
    first = messages[0]
    if not text or (first["role"] == "system" and first["content"] == text):
        return []
    if first["role"] in ("system", "developer"):
        raise UsageError(f"{key}: conflicts with the system message; expected one of them")
    return [{"role": "system", "content": text}]


def _rename_keys(message: Message, role_name: str, location: str) -> Message:
    """Return the message with the keys `role`, `content` and `tool_calls` in place of synonyms."""
    speaker_key = "role" if "role" in message else "from"
    names = speaker_key, "content" if "content" in message else "value"
    rest = {key: value for key, value in message.items() if key not in names}
    role, content = (message.get(name) for name in names)
    normalized_role = _ROLE_SYNONYMS.get(role_name, role_name)
    if normalized_role not in ROLES:
        problem = "role: required" if role is None else f"role {role!s:.40}: not supported"
        hint = did_you_mean(role, (*ROLES, *_ROLE_SYNONYMS)) if isinstance(role, str) else ""
        raise UsageError(f"{location}: {problem}; expected {', '.join(ROLES)}{hint}")
    if role_name in _CALL_KEYS:
        rest["tool_calls"] = _calls_of(content, f"{location}: {role}")
    elif content is not None:
        rest["content"] = content
    if not is_empty(call := rest.pop("function_call", "")):
        if not is_empty(rest.get("tool_calls", "")):
            raise UsageError(f"{location}: function_call: conflicts with tool_calls")
        rest["tool_calls"] = _calls_of(call, f"{location}: function_call")
    return {"role": normalized_role, **rest}


def _calls_of(content: object, location: str) -> list[Message]:
    """Return tool calls from an object, a list of objects, or JSON text."""
    is_list = isinstance(content, list) or str(content).lstrip().startswith("[")
    calls = as_list(content, location) if is_list else [content]
    functions = [as_object(each, location) for each in calls]
    return [each if "function" in each else {"type": "function", "function": each}
            for each in functions]  # fmt: skip


def _normalize_content(message: Message, location: str) -> None:
    for key in message.keys() & _UNSUPPORTED_KEYS:
        if not is_empty(message[key]):
            raise UsageError(f"{location}: {key}: not supported; expected text only")
    content = message.get("content", "")
    if isinstance(content, list):
        parts = enumerate(content, 1)
        message["content"] = [_normalize_part(x, f"{location}: part {n}") for n, x in parts]
        content = "".join(part["text"] for part in message["content"])
    if not isinstance(content, str):
        raise UsageError(f"{location}: content: expected text or a list of parts")
    if "tool_calls" in message:
        key = f"{location}: tool_calls"
        calls = [as_object(each, key) for each in as_list(message["tool_calls"], key)]
        if calls and message["role"] != ASSISTANT:
            raise UsageError(f"{key}: only valid with role {ASSISTANT}")
        message["tool_calls"] = [_check_call(call, location) for call in calls]
    for name in message.keys() & set(REASONING):
        expect_text(message, name, f"{location}: ")
    has_more = message.get("tool_calls") or any(message.get(name) for name in REASONING)
    may_be_empty = message["role"] in ("system", "developer", "tool", "function") or has_more
    if not content.strip() and not may_be_empty:
        raise UsageError(f"{location}: content: empty; required for role {message['role']}")
    message.setdefault("content", "")


def _normalize_part(part: Any, location: str) -> Message:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        raise UsageError(f"{location} of type {kind!s:.40}: not supported; expected text")
    if loss_flag(part, f"{location}: ") is False:
        raise UsageError(f"{location}: loss of a part: not supported; expected one for the message")
    return {key: value for key, value in part.items() if key not in LOSS_KEYS}


def _check_call(call: Message, location: str) -> Message:
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UsageError(f"{location}: tool_calls: the function's name is required")
    location = f"{location}: arguments of {function['name']:.40}"
    arguments = function.get("arguments", {})
    for key in _SIMILAR_TO_ARGUMENTS:
        if key in function and "arguments" not in function:
            raise UsageError(f"{location}: {key}: not supported; expected arguments")
    if isinstance(arguments, str) and arguments.strip():
        content = parse_json(arguments, dict[str, Any], location)
        msgspec.msgpack.encode(content)  # raises UnicodeEncodeError for a lone surrogate
    elif not isinstance(arguments, str | dict):
        raise UsageError(f"{location}: expected an object")
    return call


def _ignored_paths(message: Message) -> set[str]:
    paths = {f"messages[].{key}" for key in message.keys() - _USED_KEYS["message"]}
    if isinstance(message["content"], list):
        for part in message["content"]:
            paths |= {f"messages[].content[].{key}" for key in part.keys() - _USED_KEYS["part"]}
    for call in message.get("tool_calls", []):
        path, function = "messages[].tool_calls[]", call
        if "function" in call:
            paths |= {f"{path}.{key}" for key in call.keys() - _USED_KEYS["call"]}
            path, function = f"{path}.function", call["function"]
        paths |= {f"{path}.{key}" for key in function.keys() - _USED_KEYS["function"]}
    return paths
