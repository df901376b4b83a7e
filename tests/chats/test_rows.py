"""Rows in the spellings of other programs: each is read as a conversation, or refused."""

import gc
import json
from typing import Any

import msgspec
import pytest

from fsdpctl.chats.formats import Chat, PlainText
from fsdpctl.chats.rows import read_rows
from fsdpctl.chats.values import from_extension
from fsdpctl.errors import UsageError

SURROGATE = "\\ud800"


def user(content: Any = "a", **keys: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **keys}


def answer(content: Any = "b", **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def system(content: str = "be kind") -> dict[str, Any]:
    return {"role": "system", "content": content}


def share(role: str, value: Any, **keys: Any) -> dict[str, Any]:
    return {"from": role, "value": value, **keys}


def talk(**keys: Any) -> dict[str, Any]:
    """Return a row of one turn; its answer has the keys."""
    return {"messages": [user(), answer(**keys)]}


def call(arguments: Any = None, name: str = "f", **keys: Any) -> dict[str, Any]:
    function = {"name": name} if arguments is None else {"name": name, "arguments": arguments}
    return {"type": "function", "function": function, **keys}


def calls(*functions: dict[str, Any], content: str = "") -> dict[str, Any]:
    return answer(content, tool_calls=list(functions))


def means(
    *messages: dict[str, Any], trained: list[bool] | None = None, tools: list[Any] | None = None,
    ignored: str = "",
) -> tuple[Chat, set[str]]:  # fmt: skip
    """Return the expected chat of a row, and the keys that are reported as ignored."""
    return Chat(list(messages), trained or [True] * len(messages), tools), set(ignored.split())


TURN = [user(), answer()]
PLAIN, OFF = means(*TURN), means(*TURN, trained=[True, False])
BARE = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": BARE}
DONE = {"role": "tool", "content": "21"}

ROWS: dict[str, tuple[Any, Any]] = {
    # Loss flags.
    **{
        f"{key}: {value!r}": (talk(**{key: value}), OFF if not value else PLAIN)
        for key in ("weight", "train", "training", "loss", "loss_scale")
        for value in (0, 1, False, True, 0.0, 1.0)
    },
    "null flags": (talk(loss=None, weight=None, train_detail=None), PLAIN),
    "one of two flags": (talk(loss=True, weight=0), OFF),
    "an empty detail": (talk(train_detail=[]), means(user(), answer(train_detail=[]),
        ignored="messages[].train_detail")),
    "a flag of a row": ({"messages": TURN, "weight": 0}, means(*TURN, trained=[False, False])),
    "a row that is trained": ({"messages": TURN, "train": True}, PLAIN),
    "false on a user": ({"messages": [user(train=False), answer()]},
        means(*TURN, trained=[False, True])),
    "weight of ShareGPT": ({"conversations": [share("human", "a", weight=0),
        share("gpt", "b", weight=0)]}, means(*TURN, trained=[False, False])),
    "weights of OpenHermes": ({"conversations": [share("human", "a", weight=None),
        share("gpt", "b", weight=None)], "system_prompt": "be kind", "source": "x",
        "skip_prompt_formatting": False, "title": None},
        means(system(), *TURN, ignored="source skip_prompt_formatting")),
    "half a weight": (talk(weight=0.5), r"message 2: weight 0\.5: not supported; expected true"),
    "a loss scale": (talk(loss_scale=2.0), "message 2: loss_scale 2.0: not supported"),
    "a flag as text": (talk(train="false"), "message 2: train false: not supported"),
    "a mask": (talk(mask=True), "message 2: mask: not supported; expected weight, train"),
    "a loss mask": (talk(loss_mask=0), "message 2: loss_mask: not supported"),
    "a detail": (talk(train_detail=[{"begin_offset": 0, "end_offset": 1, "train": True}]),
        "message 2: train_detail: not supported"),
    "another detail": (talk(training_detail=[{"train": True}]), "training_detail: not supported"),
    "true on a user": ({"messages": [user(train=True), answer()]},
        "message 1: train: only valid with role assistant"),
    "a masked role": ({"messages": TURN, "mask": "User"}, "^.*line 1: mask: not supported"),
    "a weight of a row": ({"messages": TURN, "weight": 0.3}, "line 1: weight 0.3: not supported"),
    "a trained part": (talk(content=[{"type": "text", "text": "b", "train": True}]),
        means(user(), answer([{"type": "text", "text": "b"}]))),
    "a masked part": (talk(content=[{"type": "text", "text": "b", "train": False}]),
        "message 2: part 1: loss of a part: not supported"),
    "a mask of a text": ({"text": "x", "loss": 0}, "loss: only valid with messages"),
    # Tools.
    "tools": ({"messages": TURN, "tools": [TOOL]}, means(*TURN, tools=[TOOL])),
    "tools as JSON": ({"messages": TURN, "tools": json.dumps([TOOL])}, means(*TURN, tools=[TOOL])),
    "tools, each as JSON": ({"messages": TURN, "tools": [json.dumps(TOOL)]},
        means(*TURN, tools=[TOOL])),
    "functions": ({"messages": TURN, "functions": [BARE]}, means(*TURN, tools=[TOOL])),
    "functions as tools": ({"messages": TURN, "tools": json.dumps([BARE])},
        means(*TURN, tools=[TOOL])),
    "a flat tool": ({"messages": TURN, "tools": [{"type": "function", **BARE}]},
        means(*TURN, tools=[TOOL])),
    "parameters as JSON": ({"messages": TURN, "tools": [{"type": "function", "function":
        {"name": "f", "parameters": '{"type": "object"}'}}]}, means(*TURN, tools=[TOOL])),
    "no tools": ({"messages": TURN, "tools": "", "functions": []}, PLAIN),
    "equal tools": ({"messages": TURN, "tools": [BARE], "functions": [BARE]},
        means(*TURN, tools=[TOOL])),
    "two kinds of tools": ({"messages": TURN, "tools": [TOOL], "functions": [BARE]},
        "functions: conflicts with tools"),
    "tools of a type": ({"messages": TURN, "tools": {"f": 1}}, "tools: expected a list"),
    "a tool of a type": ({"messages": TURN, "tools": [5]}, "tools: tool 1: expected a JSON object"),
    "tools that are not JSON": ({"messages": TURN, "tools": "def f()"}, "tools: not JSON"),
    "tools of a text": ({"text": "x", "tools": [TOOL]}, "only valid with messages; to ignore it, "
                        "set data=text"),
    "settings of the API": ({"messages": TURN, "parallel_tool_calls": False, "tool_choice": "auto"},
        means(*TURN, ignored="parallel_tool_calls tool_choice")),
    # Calls.
    "arguments as JSON": ({"messages": [user(), calls(call('{"a": 1}')), DONE, answer()]},
        means(user(), calls(call('{"a": 1}')), DONE, answer())),
    "a function_call": ({"messages": [user(), answer(None, function_call={"name": "f",
        "arguments": "{}"}), {"role": "function", "name": "f", "content": "21"}, answer()]},
        means(user(), calls(call("{}")), {"role": "function", "name": "f", "content": "21"},
        answer(), ignored="messages[].name")),
    "a function_call and text": (talk(function_call={"name": "f"}), means(user(),
        calls(call(), content="b"))),
    "no function_call": (talk(function_call=None, tool_calls=None, refusal=None), PLAIN),
    "a call of LLaMA-Factory": ({"conversations": [share("human", "a"), share("function_call",
        '{"name": "f", "arguments": {"a": 1}}'), share("observation", "21"), share("gpt", "b")],
        "tools": json.dumps([BARE])},
        means(user(), calls(call({"a": 1})), DONE, answer(), tools=[TOOL])),
    "calls in a list": ({"conversations": [share("human", "a"),
        share("function_call", '[{"name": "f"}, {"name": "g"}]')]},
        means(user(), calls(call(), call(name="g")))),
    "parallel calls of ms-swift": ({"messages": [user(), {"role": "tool_call", "content":
        '{"name": "f"}', "loss": False}, {"role": "tool_call", "content": '{"name": "g"}'},
        {"role": "tool_response", "content": "21"}, answer()]},
        means(user(), calls(call(), call(name="g")), DONE, answer(),
        trained=[True, False, True, True])),
    "a call behind text": ({"messages": [user(), answer(), {"role": "tool_call", "content":
        {"name": "f"}}]}, means(user(), calls(call(), content="b"))),
    "a call of another loss": ({"messages": [user(), answer(), {"role": "tool_call", "content":
        {"name": "f"}, "loss": False}]}, "message 3: loss: conflicts with message 2"),
    "two kinds of calls": (talk(tool_calls=[call()], function_call={"name": "f"}),
        "message 2: function_call: conflicts with tool_calls"),
    "a call that is no object": (talk(function_call="auto"), "message 2: function_call: not JSON"),
    "tool_calls as JSON": (talk(tool_calls=json.dumps([call({})])),
        means(user(), calls(call({}), content="b"))),
    "keys of a call": (talk(tool_calls=[call({}, id="x", index=0)]),
        means(user(), calls(call({}, id="x", index=0), content="b"),
        ignored="messages[].tool_calls[].id messages[].tool_calls[].index")),
    "arguments of another name": (talk(tool_calls=[{"name": "f", "parameters": {"a": 1}}]),
        "message 2: arguments of f: parameters: not supported; expected arguments"),
    "arguments in a list": (talk(tool_calls=[call([1])]), "arguments of f: expected an object"),
    "arguments that are not JSON": (talk(tool_calls=[call("a=1")]), "arguments of f: not JSON"),
    "arguments twice": (talk(tool_calls=[call('{"a": 1, "a": 2}')]), "JSON: a appears twice"),
    "nulls in arguments": (talk(tool_calls=[call({"a": None, "b": [{"c": None}]})]),
        means(user(), calls(call({"b": [{}]}), content="b"))),
    "nulls in JSON": (talk(tool_calls=[call('{"a": null, "b": [{"c": null}]}')]),
        means(user(), calls(call('{"a": null, "b": [{"c": null}]}'), content="b"))),
    "calls of a user": ({"messages": [user(tool_calls=[call()]), answer()]},
        "message 1: tool_calls: only valid with role assistant"),
    # System messages.
    **{key: ({"messages": TURN, key: "be kind"}, means(system(), *TURN))
        for key in ("system", "system_prompt", "system_message")},
    "the same system twice": ({"messages": [system(), *TURN], "system": "be kind",
        "system_prompt": "be kind"}, means(system(), *TURN)),
    "no system": ({"messages": [system(), *TURN], "system": ""}, means(system(), *TURN)),
    "two systems": ({"messages": [system("x"), *TURN], "system_prompt": "be kind"},
        "line 1: system_prompt: conflicts with the system message"),
    "two keys of systems": ({"messages": TURN, "system": "x", "system_prompt": "be kind"},
        "system_prompt: conflicts with system"),
    "a system of a type": ({"messages": TURN, "system": ["x"]}, "system: expected text"),
    "a system of a text": ({"prompt": "a", "completion": "b", "system": "x"},
        "system: only valid with messages"),
    # Roles.
    **{f"role {role}": ({"messages": [{"role": role, "content": "a"}, answer()]}, PLAIN)
        for role in ("human", "Human", "USER", "prompter")},
    **{f"role {role}": ({"messages": [user(), {"role": role, "content": "b"}]}, PLAIN)
        for role in ("gpt", "bot", "model", "chatgpt", "ai", "Assistant")},
    **{f"role {role}": ({"messages": [user(), {"role": role, "content": "21"}, answer()]},
        means(user(), DONE, answer())) for role in ("observation", "tool-response", "ipython")},
    "role robot": ({"messages": [user(), {"role": "robot", "content": "b"}]}, "role robot"),
    # Instructions.
    "Alpaca": ({"instruction": "add", "input": "1 2", "output": "b", "id": 7},
        means(user("add\n1 2"), answer(), ignored="id")),
    "Dolly": ({"instruction": "add", "context": "1 2", "response": "b", "category": "x"},
        means(user("add\n1 2"), answer(), ignored="category")),
    "ms-swift": ({"system": "be kind", "query": "a", "response": "b", "history": [["c", "d"]]},
        means(system(), user("c"), answer("d"), *TURN)),
    "history as JSON": ({"query": "a", "response": "b", "history": '[["c", "d"]]'},
        means(user("c"), answer("d"), *TURN)),
    "OpenOrca": ({"id": "x", "system_prompt": "", "question": "a", "response": "b"},
        means(*TURN, ignored="id")),
    "a history of a type": ({"query": "a", "response": "b", "history": ["c"]},
        "history: expected pairs"),
    "an answer of a type": ({"query": "a", "response": ["b"]}, "response: expected text"),
    # Data for other kinds of training.
    **{key: ({"messages": TURN, key: value}, f"line 1: {key}: .*not supported; remove the key")
        for key, value in {"rejected_response": "x", "rejected_messages": TURN, "chosen": TURN,
        "rejected": "x", "label": False, "kto_tag": True, "images": ["x.png"], "videos": ["x"],
        "audios": ["x"], "image": "x.png", "objects": {"bbox": [[1]]}, "input_ids": [1],
        "labels": [1]}.items()},
    "preferences alone": ({"prompt": "a", "chosen": "b", "rejected": "c"},
        "line 1: chosen: preference data: not supported"),
    "preferences of OpenAI": ({"input": {"messages": TURN}, "preferred_output": TURN,
        "non_preferred_output": TURN}, "preferred_output: preference data: not supported"),
    "empty media": ({"messages": TURN, "images": [], "label": None, "objects": {}, "rejected": ""},
        means(*TURN, ignored="images objects rejected")),
    "media of a message": (talk(images=["x.png"]), "message 2: images: not supported"),
    "an image": ({"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}]), answer()]},
        "message 1: part 1 of type image_url: not supported"),
    "a use of a tool": (talk(content=[{"type": "tool_use", "name": "f", "input": {}}]),
        "message 2: part 1 of type tool_use: not supported"),
    "a refusal": (talk(content=None, refusal="no"), "message 2: refusal: not supported"),
    "a text as a part": (talk(content=["b"]), "message 2: part 1 of type None: not supported"),
    # Metadata.
    "a name": ({"messages": [user(name="Al"), answer()], "source": "x"},
        means(user(name="Al"), answer(), ignored="messages[].name source")),
    "a key of a part": ({"messages": [user([{"type": "text", "text": "a", "cache": 1}]), answer()]},
        means(user([{"type": "text", "text": "a", "cache": 1}]), answer(),
        ignored="messages[].content[].cache")),
    "both spellings": ({"conversations": [user(value="x", **{"from": "human"}), answer()]},
        means(user(value="x", **{"from": "human"}), answer(),
        ignored="messages[].value messages[].from")),
    "a prompt beside messages": ({"prompt": "a", "prompt_id": "x", "messages": TURN},
        means(*TURN, ignored="prompt prompt_id")),
    "a text": ({"text": "x", "url": "y"}, (PlainText("x"), {"url"})),
    "two texts": ({"prompt": "a", "completion": "b"}, (PlainText("ab", 1), set())),
    # Values that JSON or a library cannot hold.
    "an integer": (talk(tool_calls=[call({"wei": 10**21, "n": [-(2**63) - 1, 2**64 - 1]})]),
        means(user(), calls(call({"wei": 10**21, "n": [-(2**63) - 1, 2**64 - 1]}), content="b"))),
    "an integer in a schema": ({"messages": TURN, "functions": [{"name": "f", "parameters":
        {"maximum": 2**70}}]}, means(*TURN, tools=[{"type": "function", "function": {"name": "f",
        "parameters": {"maximum": 2**70}}}])),
    "an integer of metadata": ({"messages": TURN, "id": 10**30}, means(*TURN, ignored="id")),
    "an integer as content": (talk(content=10**30), "message 2: content: expected text"),
    "an integer as a weight": (talk(weight=10**30), "message 2: weight .*: not supported"),
    "a long integer": ('{"messages": [], "id": ' + "9" * 5000 + "}", "line 1: not JSON: .*digits"),
    "a float": ('{"messages": [], "id": 1e400}', "line 1: not JSON: 1e400: number too large"),
    "no number": ('{"messages": [], "id": NaN}', "line 1: not JSON: NaN is not a number"),
    "a key twice": ('{"messages": [], "messages": []}', "line 1: not JSON: messages appears twice"),
    "too deep": ('{"messages": ' + "[" * 5000 + "]" * 5000 + "}", "line 1: nested deeper"),
    "half a pair": ('{"text": "' + SURROGATE + '"}', "line 1: contains a lone surrogate"),
    "half a pair in arguments": (json.dumps(talk(tool_calls=[call('{"a": "' + SURROGATE + '"}')])),
        "line 1: contains a lone surrogate"),
    "half a pair in a key": ('{"text": "x", "' + SURROGATE + '": 1}', (PlainText("x"), {"\ud800"})),
    # Formats and damage.
    "messages as JSON": ({"messages": json.dumps(TURN)}, PLAIN),
    "a prompt of messages": ({"prompt": TURN[:1], "completion": TURN[1:]},
        means(*TURN, trained=[False, True])),
    "reasoning": (talk(reasoning="hm"), means(user(), answer(reasoning="hm"))),
    "no messages": ({"messages": []}, "the conversation has no messages"),
    "messages of a type": ({"messages": 5}, "messages: expected a list, got a number"),
    "a message of a type": ({"messages": [5]}, "message 1: expected a JSON object, got a number"),
    "messages that are not JSON": ({"messages": "x"}, "messages: not JSON"),
    "a role with a typo": ({"messages": [{"role": "asistant"}]}, "did you mean assistant"),
    "no role": ({"messages": [{"content": "x"}]}, "message 1: role: required"),
    "no answer": ({"messages": [user()]}, "no assistant message"),
    "an empty user": ({"messages": [user(""), answer()]}, "empty; required for role user"),
    "an empty answer": (talk(content=None), "message 2: content: empty; required for role"),
    "a call without a name": (talk(tool_calls=[{}]), "the function's name is required"),
    "an unknown format": ({"question": "x"}, "unknown format with keys question; expected"),
    "no completion": ({"prompt": "a", "completion": ""}, "completion: empty; expected text"),
}  # fmt: skip


def unpacked(chat: Chat | PlainText) -> object:
    """Return a chat as a template's process receives it."""
    packed = msgspec.msgpack.encode(chat)
    return msgspec.msgpack.decode(packed, type=Chat | PlainText, ext_hook=from_extension)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_means_what_its_program_means(name, tmp_path):
    row, expected = ROWS[name]
    if name == "too deep":
        gc.collect()  # finalizers of other tests would fail within the recursion
    file = tmp_path / "chats.jsonl"
    file.write_text(row if isinstance(row, str) else json.dumps(row))
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected) as caught:
            list(read_rows(str(file))[1])
        assert str(caught.value).startswith(f"{file}, line 1: ")
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400
        return
    ((line, _),) = read_rows(str(file))[1]
    assert (unpacked(line.content), line.keys.ignored) == expected
