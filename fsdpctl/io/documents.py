"""JSON, YAML and TOML of others: of bounded size and depth, no key twice, of the types expected."""

import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from fsdpctl.errors import UsageError
from fsdpctl.io.files import Refusal, read_text_file

MIB = 1 << 20
MOST_DEEP = 64  # objects in objects; a tokenizer.json has ten
_MOST_CONFIG_BYTES = MIB // 8  # the longest configuration has a sixteenth of it
_MOST_ALIASES = 64
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"')
_NO_BRACKETS = re.compile(r"[^\[\]{}]+")
_INNERMOST = re.compile(r"\[\]|\{\}")
T = TypeVar("T")


def read_json(
    path: Path,
    schema: type[T],
    *,
    most_bytes: int = 16 * MIB,
    refusal: Refusal = UsageError,
    finite: bool = True,
    follows: bool = False,
) -> T:
    """The JSON in a regular UTF-8 file, as `parse_json` reads it; links as in `open_regular`.

    Raises:
        FsdpctlError: of the kind `refusal`; the message begins with the path.
    """
    text = read_text_file(path, most_bytes, refusal, follows=follows)
    return parse_json(text, schema, str(path), refusal, finite=finite)


def parse_json(
    text: str | bytes,
    schema: type[T],
    where: str,
    refusal: Refusal = UsageError,
    *,
    finite: bool = True,
) -> T:
    """JSON as a value of the type `schema`: a dataclass, `dict[str, int]`, …

    Args:
        text: in UTF-8, if bytes.
        schema: what msgspec converts to, without making numbers out of text or the like.
        where: what a message begins with.
        refusal: the kind of error.
        finite: whether infinite numbers and NaN are refused, which JSON does not have.

    Raises:
        FsdpctlError: of the kind `refusal`; it is none, or too deep, or has a key twice, or is of
            other types.
    """
    numbers: dict[str, Any] = {}
    if finite:
        numbers = {"parse_constant": _refuse_constant, "parse_float": _finite_float}
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        content = json.loads(text, object_pairs_hook=_without_doubles, **numbers)
    except RecursionError:
        raise refusal(f"{where}: nested deeper than {MOST_DEEP} levels") from None
    except ValueError as error:
        raise refusal(f"{where}: not JSON: {error}") from None
    if _is_deep(text):
        raise refusal(f"{where}: nested deeper than {MOST_DEEP} levels")
    return as_type(content, schema, where, refusal)


def as_type(content: object, schema: type[T], where: str, refusal: Refusal = UsageError) -> T:
    """`content`, of plain values, as a value of the type `schema`.

    Raises:
        FsdpctlError: of the kind `refusal`; the types are others.
    """
    try:
        return msgspec.convert(content, schema)
    except ValueError as error:  # of other types, or text that is no Unicode
        raise refusal(f"{where}: not as expected: {error}") from None


def check_version(
    content: Mapping[str, Any], expected: tuple[str, int], what: str, where: str, refusal: Refusal
) -> None:
    """See that a document of ours says that it is one, of the version that is read.

    Raises:
        FsdpctlError: of the kind `refusal`; it does not.
    """
    format_name, version = expected
    if content.get("format") != format_name:
        raise refusal(f"{where}: not {what}")
    if content.get("version") != version:
        raise refusal(
            f"{where}: version {content.get('version')!s:.20} of the format, where this fsdpctl "
            f"reads version {version}"
        )


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"{_double(name for name, _ in pairs)} is there twice")
    return found


def _double(names: Any) -> str:
    return str(Counter(names).most_common(1)[0][0])[:80]


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:80]} is too large a number")
    return number


def _is_deep(text: str) -> bool:
    """Whether JSON, which must be well formed, is too deep: each turn takes the innermost away."""
    if text.count("[") + text.count("{") <= MOST_DEEP:
        return False
    brackets = _NO_BRACKETS.sub("", _STRING.sub("", text))
    for _ in range(MOST_DEEP):
        if not brackets:
            return False
        brackets = _INNERMOST.sub("", brackets)
    return bool(brackets)


class _Loader(yaml.BaseLoader):
    """Every scalar stays text; no key twice, few aliases."""

    num_aliases = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            self.num_aliases += 1
            if self.num_aliases > _MOST_ALIASES:
                raise yaml.YAMLError(f"more than {_MOST_ALIASES} aliases")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            name = _double(self.construct_object(key) for key, _ in node.value)
            raise yaml.YAMLError(f"{name} is there twice")
        return found


def read_yaml(path: Path) -> object:
    """The YAML in a regular UTF-8 file; numbers, true and null stay the text that they are.

    Raises:
        UsageError: it is none, or larger, deeper or fuller of aliases than a configuration is.
    """
    text = read_text_file(path, _MOST_CONFIG_BYTES, follows=True)
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise UsageError(f"{path}: not YAML that is read: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{path}: not YAML: {' '.join(str(error).split())}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The TOML in a regular UTF-8 file.

    Raises:
        UsageError: it is none, or larger or deeper than a configuration is.
    """
    text = read_text_file(path, _MOST_CONFIG_BYTES, follows=True)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"{path}: not TOML that is read: nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"{path}: not TOML: {error}") from None
