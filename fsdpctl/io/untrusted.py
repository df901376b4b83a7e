"""Reads untrusted JSON and YAML: limits size and depth, rejects duplicate keys, checks types."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import msgspec
import yaml

from fsdpctl.errors import UsageError
from fsdpctl.io.files import ErrorType, read_text_file

MAX_DEPTH = 64  # nested levels; a tokenizer.json has 10
T = TypeVar("T")
MAX_COUNT = 1 << 60  # bytes, elements, steps
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]


def read_json(
    path: Path, schema: type[T], *, error_type: ErrorType = UsageError, follow_links: bool = False
) -> T:
    """Read a JSON file, with the limits of `read_regular` and the checks of `parse_json`."""
    text = read_text_file(path, error_type, follow_links=follow_links)
    return parse_json(text, schema, str(path), error_type)


def parse_json(
    text: str | bytes,
    schema: type[T],
    location: str,
    error_type: ErrorType = UsageError,
    *,
    finite: bool = True,
) -> T:
    """Decode JSON into the type `schema`, or raise `error_type`; `finite` rejects inf and NaN.

    msgspec would decode faster, but it accepts duplicate keys.
    """
    hooks: dict[str, Any] = {}
    if finite:
        hooks = {"parse_constant": _refuse_constant, "parse_float": _finite_float}
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        content = json.loads(text, object_pairs_hook=_reject_duplicates, **hooks)
    except RecursionError:
        raise error_type(f"{location}: nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise error_type(f"{location}: not JSON: {error}") from None
    if _is_deep(content):
        raise error_type(f"{location}: nested deeper than {MAX_DEPTH} levels")
    return as_type(content, schema, location, error_type)


def as_type(value: object, schema: type[T], location: str, error_type: ErrorType = UsageError) -> T:
    """Convert `content`, made of built-in types, to the type `schema`, or raise `error_type`."""
    try:
        return msgspec.convert(value, schema)
    except ValueError as error:  # wrong type, or invalid Unicode
        raise error_type(f"{location}: {error}") from None


def check_version(
    content: Mapping[str, Any],
    expected: tuple[str, int],
    noun: str,
    location: str,
    error_type: ErrorType,
) -> None:
    """Raise `error_type` unless `content` declares the `expected` format and version."""
    format_name, version = expected
    if content.get("format") != format_name:
        raise error_type(f"{location}: not {noun}")
    if content.get("version") != version:
        problem = f"version {content.get('version')!s:.20} is not supported"
        raise error_type(f"{location}: {problem}; expected version {version}")


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError(f"{_most_frequent(name for name, _ in pairs)} appears twice")
    return content


def _most_frequent(names: Any) -> str:
    return str(Counter(names).most_common(1)[0][0])[:80]


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number in JSON")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:80]}: number too large")
    return number


def _is_deep(content: object) -> bool:
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
        level = [x for each in level for x in (each.values() if isinstance(each, dict) else each)]
    return True


class _Loader(yaml.BaseLoader):
    """A loader that keeps scalars as text, and rejects duplicate keys and aliases."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            line = cast(Any, self).peek_event().start_mark.line + 1
            raise yaml.YAMLError(f"line {line}: aliases are not supported; repeat the value")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        content: dict[Any, Any] = super().construct_mapping(node, deep)
        if len(content) < len(node.value):  # a duplicate key
            name = _most_frequent(self.construct_object(key) for key, _ in node.value)
            raise yaml.YAMLError(f"{name} appears twice")
        return content


def read_yaml(path: Path) -> object:
    """Read a YAML file without aliases. All scalars are text, also numbers, true and null."""
    return parse_yaml(read_text_file(path, follow_links=True), str(path))


def parse_yaml(text: str, path: str) -> object:
    """Decode YAML as `read_yaml` does; errors begin with `path`."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise UsageError(f"{path}: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        mark, text = getattr(error, "problem_mark", None), str(error)
        if mark is not None:
            text = f"line {mark.line + 1}, column {mark.column + 1}: {cast(Any, error).problem}"
        text = " ".join(text.replace(' in "<unicode string>",', " at").split())
        raise UsageError(f"{path}: not YAML: {text}") from None
