"""Jinja as chat templates know it: what transformers 5 gives them, with nothing that leads out.

After `transformers.utils.chat_template_utils`, which templates are written for: the same options,
filters, globals and the `generation` block. Stricter in one thing: reading an attribute that the
sandbox keeps closed is an error here, where Jinja prints nothing and only goes no further.
"""

import json
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


class MarkedText:
    """What a rendering wrote so far, and which characters of it lie in `generation` blocks."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.length = 0
        self.spans: list[tuple[int, int]] = []


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, counted from the last block written before it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        text = str(caller())
        marked = getattr(self.environment, "marked", None)
        if isinstance(marked, MarkedText):
            marked.spans.append((marked.length, marked.length + len(text)))
        return text


class _Namespace(Namespace):
    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _refuse_private(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"{name!r}: a name that begins with _")


class _Dict:
    """`dict(…)` without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Where templates are compiled and rendered."""

    def __init__(self, today: datetime) -> None:
        """`today` is what `strftime_now` tells."""
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.marked: MarkedText | None = None
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = today.strftime
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Never: such an attribute is refused when it is read."""
        raise SecurityError(
            f"it reads the attribute {attribute!r} of a {type(obj).__name__}, which is closed"
        )


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
