"""One name, one meaning: classes, aliases of types and public constants of the package."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

import pytest

from tests.test_architecture import package_sources

# Names of one letter stand for types (T) or an imported class.
_ALIAS = re.compile(r"_?[A-Z][a-z]\w+|[A-Z][A-Z_0-9]+")


def meanings(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the top-level names that several modules define differently, with these modules."""
    defined: dict[str, dict[str, str]] = defaultdict(dict)
    for module, source in sources.items():
        for node in ast.parse(source).body:
            for name, meaning in _defined(node):
                defined[name][module] = meaning or module
    return {name: sorted(values) for name, values in defined.items() if len({*values.values()}) > 1}


def _defined(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield the name of a class, alias or constant, and its value as code ("": a class)."""
    if isinstance(node, ast.ClassDef):
        yield node.name, ""
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name) and _ALIAS.fullmatch(target.id):
                yield target.id, ast.unparse(node.value) if node.value else ""


def test_a_name_has_one_meaning() -> None:
    assert not meanings(package_sources())


@pytest.mark.parametrize("first, second", [
    ("class Row: ...", "class Row: ..."), ("class Row: ...", "Row = dict[str, int]"),
    ("class _Product: ...", "class _Product: ..."), ("FILE = 'a.txt'", "FILE = 'data.file'"),
])  # fmt: skip
def test_a_second_meaning_would_be_noticed(first: str, second: str) -> None:
    sources = {"fsdpctl.plan.a": first, "fsdpctl.models.b": second}
    assert [*meanings(sources)] == [re.split(r"\W+", first)[first.startswith("class")]]
    assert not meanings({"fsdpctl.plan.a": "NAMES = ('a',)", "fsdpctl.data.b": "NAMES = ('a',)"})
