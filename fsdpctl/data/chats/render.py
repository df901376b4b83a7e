"""Rendering of messages by a chat template, in the Jinja environment of transformers 5.

The environment follows `transformers.utils.chat_template_utils`, which templates are written for:
the same options, filters, globals and the `generation` block. It is stricter in one respect:
reading an attribute that the sandbox blocks is an error, where Jinja returns an undefined value.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from fsdpctl.data.chats.messages import REASONING
from fsdpctl.data.chats.values import Message

Spans = list[tuple[int, int]]  # of characters, half-open


class RenderError(Exception):
    """The template can't be compiled, or doesn't support the messages."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The output of a template, and the spans of its `generation` blocks."""

    text: str
    marks: Spans


# A template that asks whether arguments of calls are text already.
_TAKES_TEXT = re.compile(r"arguments\s+is\s+string")


class Renderer:
    """A compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], today: str) -> None:
        """Compile the template.

        Args:
            source: The text of the template.
            special_tokens: The named tokens of the tokenizer, such as `bos_token`.
            today: The date for `strftime_now`, YYYY-MM-DD.

        Raises:
            RenderError: If the source isn't a template.
        """
        self._environment = _Environment(datetime.strptime(today, "%Y-%m-%d"))
        self._special_tokens = dict(special_tokens)
        self.takes_text = _TAKES_TEXT.search(source) is not None
        try:
            self.has_marks = _has_marks(self._environment, source)
            self._template = self._environment.from_string(source)
        except Exception as error:  # also SyntaxError and RecursionError
            raise RenderError(_one_line(error)) from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        prompted: bool = False,
    ) -> Rendered:
        """Render messages, with `prompted` followed by the header of an assistant message.

        Raises:
            RenderError: If the template rejects the messages or fails. The message is one line.
        """
        variables = {
            **self._special_tokens,
            **(options or {}),
            "messages": [_with_reasoning(message) for message in messages],
            "tools": tools,
            "documents": (options or {}).get("documents"),
            "add_generation_prompt": prompted,
        }
        output = self._environment.output = _Output()
        blocks = []
        try:
            for block in self._template.generate(variables):
                blocks.append(block)
                output.length += len(block)
        except Exception as error:  # templates raise more than TemplateError
            raise RenderError(_one_line(error)) from None
        return Rendered("".join(blocks), output.marks)


def _has_marks(environment: "_Environment", source: str) -> bool:
    tree = environment.parse(source)
    return any(
        isinstance(block.call.node, nodes.ExtensionAttribute)
        for block in tree.find_all(nodes.CallBlock)
    )


def _with_reasoning(message: Message) -> Message:
    """Return the message with its reasoning under each name that templates use for it."""
    found = next((message[key] for key in REASONING if message.get(key) is not None), None)
    if found is None:
        return message
    return {"thinking": found, **message, "reasoning_content": found}


def _one_line(error: Exception) -> str:
    kinds = (jinja2.TemplateError, ValueError)
    kind = "" if isinstance(error, kinds) else f"{type(error).__name__}: "
    text = " ".join(str(error).split()) or type(error).__name__
    line = ""
    if isinstance(error, jinja2.TemplateSyntaxError):
        line = f" (line {error.lineno} of the template)"
    return f"{kind}{text:.300}{line}"


class _Output:
    """The number of characters rendered so far, and the spans in `generation` blocks."""

    def __init__(self) -> None:
        self.length = 0
        self.marks: Spans = []


class _Generation(Extension):
    """The block `{% generation %}…{% endgeneration %}`.

    Its position counts from the end of the block that was rendered before it.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        text = str(caller())
        output = getattr(self.environment, "output", None)
        if isinstance(output, _Output):
            output.marks.append((output.length, output.length + len(text)))
        return text


class _Namespace(Namespace):
    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_public(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"name {name!r} begins with _")


class _Dict:
    """The function `dict(…)` without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Environment(ImmutableSandboxedEnvironment):
    def __init__(self, today: datetime) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.output: _Output | None = None
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = today.strftime
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"attribute {attribute!r} of {type(obj).__name__} is blocked")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))
