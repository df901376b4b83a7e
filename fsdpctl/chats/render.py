"""Rendering of messages by a chat template, in the Jinja environment of transformers.

The environment is stricter than Jinja's: if a template reads an attribute that the sandbox blocks,
rendering fails, whereas Jinja returns an undefined value.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError

from fsdpctl.chats.values import Message

Spans = list[tuple[int, int]]  # half-open ranges of characters
# Templates with this test accept the arguments of calls as JSON text.
_TAKES_TEXT = re.compile(r"arguments\s+is\s+string")


class RenderError(Exception):
    """The template can't be compiled, or doesn't support the messages."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The output of a template, and the spans of its `generation` blocks."""

    text: str
    generation_spans: Spans


class Renderer:
    """A compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], today: str) -> None:
        """Compile the template or raise RenderError; `today` is for `strftime_now`, YYYY-MM-DD."""
        from transformers.utils import chat_template_utils  # takes half a second

        self._source, self._special_tokens = source, dict(special_tokens)
        self._strftime = datetime.strptime(today, "%Y-%m-%d").strftime
        # transformers annotates the result as `str`, but it is a tuple with the spans.
        self._render: Callable[..., Any] = chat_template_utils.render_jinja_template
        self.takes_json_arguments = _TAKES_TEXT.search(source) is not None
        try:
            environment = chat_template_utils._compile_jinja_template(source).environment
            blocks = environment.parse(source).find_all(nodes.CallBlock)
        except Exception as error:  # also SyntaxError and RecursionError
            raise RenderError(_one_line(error)) from None
        calls = (block.call.node for block in blocks)
        self.has_generation_blocks = any(isinstance(x, nodes.ExtensionAttribute) for x in calls)
        environment.unsafe_undefined = _refuse
        self._globals = environment.globals

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """Render messages; with `add_generation_prompt`, the header of an answer follows.

        RenderError, with a message of one line, if the template rejects the messages or fails.
        """
        # transformers caches the environment of a template: other renderers, whose date may differ,
        # share it. So the clock is set only during this call.
        clock, self._globals["strftime_now"] = self._globals["strftime_now"], self._strftime
        try:
            (text,), (spans,) = self._render(
                [messages],
                tools=tools,
                chat_template=self._source,
                return_assistant_tokens_mask=True,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **(options or {})},
            )
        except Exception as error:  # templates raise more than TemplateError
            raise RenderError(_one_line(error)) from None
        finally:
            self._globals["strftime_now"] = clock
        return Rendered(text, spans)


def _refuse(value: object, attribute: str) -> NoReturn:
    raise SecurityError(f"attribute {attribute!r} of {type(value).__name__} is blocked")


def _one_line(error: Exception) -> str:
    kinds = (jinja2.TemplateError, ValueError)
    kind = "" if isinstance(error, kinds) else f"{type(error).__name__}: "
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{kind}{text:.300} (line {error.lineno} of the template)"
    return f"{kind}{text:.300}"
