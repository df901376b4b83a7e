"""A template and messages made into text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes

from fsdpctl.data.chats.environment import MarkedText, TemplateEnvironment
from fsdpctl.data.chats.messages import REASONING
from fsdpctl.data.chats.rows import Message

Spans = list[tuple[int, int]]  # of characters, half-open


class RenderError(Exception):
    """The template cannot be compiled, or does not take the messages."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a template wrote, and which of it lies in its `generation` blocks."""

    text: str
    marks: Spans


class Renderer:
    """A template, compiled."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], today: str) -> None:
        """Of its source, the tokenizer's named tokens (`bos_token`, …), and a date, YYYY-MM-DD.

        Raises:
            RenderError: it is no template.
        """
        self._environment = TemplateEnvironment(datetime.strptime(today, "%Y-%m-%d"))
        self._special_tokens = dict(special_tokens)
        try:
            self.has_marks = _has_marks(self._environment, source)
            self._template = self._environment.from_string(source)
        except Exception as error:  # SyntaxError and RecursionError too
            raise RenderError(_told(error)) from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        prompted: bool = False,
    ) -> Rendered:
        """What the template makes of the messages; `prompted`: with the beginning of an answer.

        Raises:
            RenderError: it refuses them, or fails; in one line.
        """
        variables = {
            **self._special_tokens,
            **(options or {}),
            "messages": [_aliased(message) for message in messages],
            "tools": tools,
            "documents": (options or {}).get("documents"),
            "add_generation_prompt": prompted,
        }
        marked = self._environment.marked = MarkedText()
        blocks = []
        try:
            for block in self._template.generate(variables):
                blocks.append(block)
                marked.length += len(block)
        except Exception as error:  # what templates run into is not only TemplateError
            raise RenderError(_told(error)) from None
        return Rendered("".join(blocks), marked.spans)


def _has_marks(environment: TemplateEnvironment, source: str) -> bool:
    """Whether there are `generation` blocks in it."""
    tree = environment.parse(source)
    return any(
        isinstance(block.call.node, nodes.ExtensionAttribute)
        for block in tree.find_all(nodes.CallBlock)
    )


def _aliased(message: Message) -> Message:
    """Reasoning under each of the names that templates look for it by."""
    found = next((message[key] for key in REASONING if message.get(key) is not None), None)
    if found is None:
        return message
    return {"thinking": found, **message, "reasoning_content": found}


def _told(error: Exception) -> str:
    kinds = (jinja2.TemplateError, ValueError)
    kind = "" if isinstance(error, kinds) else f"{type(error).__name__}: "
    said = " ".join(str(error).split()) or type(error).__name__
    line = ""
    if isinstance(error, jinja2.TemplateSyntaxError):
        line = f" (line {error.lineno} of the template)"
    return f"{kind}{said:.300}{line}"
