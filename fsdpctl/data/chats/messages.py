"""One message of a conversation: roles under the names they go by, and what may stand in it."""

from collections.abc import Sequence
from typing import Any

from fsdpctl.data.chats.rows import Message
from fsdpctl.errors import UsageError, nearest
from fsdpctl.io.documents import parse_json

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ASSISTANT = "assistant"
_CALL = "function_call"
_ALIASES = {
    "human": "user",
    "input": "user",
    "gpt": ASSISTANT,
    "model": ASSISTANT,
    "output": ASSISTANT,
    "bot": ASSISTANT,
    "chatgpt": ASSISTANT,
    "observation": "tool",
    "ipython": "tool",
    _CALL: ASSISTANT,
}
_FLAGS = ("weight", "train")
REASONING = ("reasoning_content", "thinking", "reasoning")


def without_nulls(value: Any) -> Any:
    """The value without the nulls that tables fill missing fields with, at any depth."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value


def check_messages(messages: Sequence[Any]) -> tuple[list[Message], list[bool]]:
    """The messages under our names, and which of them may be trained.

    Raises:
        UsageError: there are none, or one has no known role, no content or the like.
    """
    if not messages:
        raise UsageError("it has no messages")
    checked, trained = [], []
    for number, message in enumerate(messages, start=1):
        where = f"message {number}"
        if not isinstance(message, dict):
            raise UsageError(f"{where}: is no object")
        renamed = _renamed(message, where)
        trained.append(_is_trained(renamed, where))
        checked.append({key: value for key, value in renamed.items() if key not in _FLAGS})
        _check_content(checked[-1], where)
    if all(each["role"] != ASSISTANT for each in checked):
        raise UsageError("no message is the assistant's: there is nothing to train")
    return checked, trained


def _renamed(message: Message, where: str) -> Message:
    """With `role` and `content`, where it had `from` and `value`."""
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    role = message.get("role", message.get("from"))
    if "content" not in rest and "value" in message:
        rest["content"] = message["value"]
    known = _ALIASES.get(role, role) if isinstance(role, str) else None
    if known not in ROLES:
        said = "is missing" if role is None else f"{role!s:.40} is not known"
        hint = nearest(role, (*ROLES, *_ALIASES)) if isinstance(role, str) else ""
        raise UsageError(f"{where}: its role {said}; known are {', '.join(ROLES)}{hint}")
    if role == _CALL and isinstance(rest.get("content"), str):
        call = parse_json(rest.pop("content"), dict[str, Any], f"{where}: {_CALL}")
        rest["tool_calls"] = [{"type": "function", "function": call}]
    return {"role": known, **{key: value for key, value in rest.items() if key != "role"}}


def _is_trained(message: Message, where: str) -> bool:
    weight, train = message.get("weight", 1), message.get("train", True)
    if weight not in (0, 1):
        raise UsageError(f"{where}: weight {weight!s:.20}: allowed is 0 or 1")
    if not isinstance(train, bool):
        raise UsageError(f"{where}: train {train!s:.20}: allowed is true or false")
    return bool(weight) and train


def _check_content(message: Message, where: str) -> None:
    content = message.get("content", "")
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise UsageError(f"{where}: a part of type {kind!s:.40}: only text is trained on")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise UsageError(f"{where}: its content is neither text nor a list of parts")
    _check_calls(message, where)
    for name in REASONING:
        if not isinstance(message.get(name, ""), str):
            raise UsageError(f"{where}: {name} is no text")
    says_more = message.get("tool_calls") or any(message.get(name) for name in REASONING)
    may_be_empty = message["role"] in ("system", "developer", "tool", "function") or says_more
    if not content.strip() and not may_be_empty:
        raise UsageError(f"{where}: the {message['role']}'s content is empty")
    message.setdefault("content", "")


def _check_calls(message: Message, where: str) -> None:
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or (calls and message["role"] != ASSISTANT):
        raise UsageError(f"{where}: tool_calls: a list, and the assistant's")
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else {}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UsageError(f"{where}: a call of tool_calls has no name of a function")
        if not isinstance(function.get("arguments", {}), str | dict):
            raise UsageError(f"{where}: the arguments of {function['name']:.40} are no object")
