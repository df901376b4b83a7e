"""One name, one meaning: public classes of the package."""

import ast
from collections import defaultdict
from collections.abc import Mapping

import pytest

from tests.test_architecture import package_sources

# Each model file is read on its own, beside the reference implementation of its family.
PER_FAMILY = "fsdpctl.models"


def classes_of_one_name(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the public top-level classes that several modules define."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, source in sources.items():
        if not module.startswith(PER_FAMILY):
            for node in ast.parse(source).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(module)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_a_class_name_has_one_meaning() -> None:
    assert not classes_of_one_name(package_sources())


@pytest.mark.parametrize("name", ["Row", "Plan"])
def test_a_second_class_of_a_name_would_be_noticed(name: str) -> None:
    sources = {"fsdpctl.plan.a": f"class {name}: ...", "fsdpctl.data.b": f"class {name}: ..."}
    assert set(classes_of_one_name(sources)) == {name}
