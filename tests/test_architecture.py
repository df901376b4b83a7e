"""The layers of docs/architecture.md and the limits of CONTRIBUTING.md.

Every rule is a function from sources to complaints, so that tests can show that it detects faults.
"""

import ast
import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fsdpctl"
NAMES = "fsdpctl"

# Bottom to top. A module imports from lower rows or its own package, never from a neighbour.
LAYERS = [
    {"errors"},
    {"io", "plan"},
    {"config", "predict"},
    {"chats"},
    {"comm", "models", "data", "importers"},
    {"engine", "torch_engines", "optim", "checkpoint"},
    {"resolve"},
    {"estimate"},
    {"run"},
    {"training"},
    {"launch"},
    {"commands"},
]
HEIGHT = {name: height for height, row in enumerate(LAYERS) for name in row}
WITHOUT_TORCH = ["errors", "io", "plan", "config", "chats", "importers", "predict"]
# Modules that consolidate, inspect and verify a checkpoint, or look at a run.
TOOLS_WITHOUT_TORCH = [
    "fsdpctl.checkpoint.consolidate",
    "fsdpctl.checkpoint.gguf_export",
    "fsdpctl.checkpoint.pretrained",
    "fsdpctl.checkpoint.reader",
    "fsdpctl.run.progress",
]
# Commands reject invalid input before they import torch, except in these modules.
COMMANDS_WITH_TORCH = tuple(
    f"fsdpctl.commands.{name}"
    for name in ("compare.", "charts", "estimate_report", "estimate_work", "evaluate", "sample")
)
SPEAKS_DISTRIBUTED = {"comm", "launch", "torch_engines"}
# The agent's protocol for a worker's error message is part of how it is launched.
EXCEPTIONS = {("fsdpctl.training.worker", "torch.distributed.elastic.multiprocessing.errors")}
MAX_FILE, MAX_FUNCTION, MAX_PARAMS = 400, 40, 7
MAX_OPTIONS = 8  # of a command, which are typed by name; `settings` is an argument
MAX_PACKAGE = 0.10  # of the package

Sources = Mapping[str, str]  # dotted module name -> source


@functools.cache
def package_sources() -> dict[str, str]:
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(
            ".__init__"
        ): file.read_text("utf-8")
        for file in sorted(PACKAGE.rglob("*.py"))
    }


@functools.cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache
def imports(source: str, *, runs: bool = False) -> set[str]:
    """Return imported modules and names; with `runs`, without imports for types only."""
    tree = parsed(source)
    result: set[str] = set()
    for node in _running(tree) if runs else ast.walk(tree):
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            result |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return result


def _running(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield child
            yield from _running(child)


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "fsdpctl" and parts[1] in HEIGHT else None


def wrong_directions(sources: Sources) -> list[str]:
    results = []
    for module, source in sources.items():
        here = layer_of(module)
        for name in imports(source):
            there = layer_of(name)
            if name.startswith("."):
                results.append(f"{module}: relative import")
            if here and there and there != here and HEIGHT[there] >= HEIGHT[here]:
                results.append(f"{module} imports {name}")
    return results


def unplaced(sources: Sources) -> list[str]:
    top = {module.split(".")[1] for module in sources if module.count(".") >= 1}
    return sorted(top - set(HEIGHT) - {"__main__"})


def cycles(sources: Sources) -> list[str]:
    """Return modules that import one another, in functions too, except for types only.

    `fsdpctl` itself is left out: it only re-exports names.
    """
    graph = {
        module: {name for name in imports(source, runs=True) if name in sources} - {module, NAMES}
        for module, source in sources.items()
    }
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def too_long(sources: Sources) -> list[str]:
    results = []
    for module, source in sources.items():
        if len(source.splitlines()) > MAX_FILE:
            results.append(f"{module}: {len(source.splitlines())} lines")
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.FunctionDef):
                # A docstring does not count as part of the body.
                first = node.body[0]
                documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
                begin = (first.end_lineno or 0) if documented else node.lineno - 1
                length = (node.end_lineno or 0) - begin
                parameters = node.args.args + node.args.kwonlyargs
                count = len(
                    [each for each in parameters if each.arg not in ("self", "cls", "settings")]
                )
                if length > MAX_FUNCTION:
                    results.append(f"{module}.{node.name}: {length} lines")
                prefixes = [f"commands.{arg}." for arg in node.name.split("_")]
                is_command = any(each in f"{module}." for each in prefixes)
                if count > (MAX_OPTIONS if is_command else MAX_PARAMS):
                    results.append(f"{module}.{node.name}: {count} parameters")
    return results


def distributed_elsewhere(sources: Sources) -> list[str]:
    return [
        f"{module} imports {name}"
        for module, source in sources.items()
        for name in sorted(imports(source))
        if f"{name}.".startswith("torch.distributed.")
        and layer_of(module) not in SPEAKS_DISTRIBUTED
        and not any(module == here and name.startswith(there) for here, there in EXCEPTIONS)
    ]


def large_packages(sources: Sources) -> list[str]:
    """Return the packages that have too many of all lines."""
    sizes: Counter[str] = Counter()
    for module, source in sources.items():
        sizes[layer_of(module) or ""] += len(source.splitlines())
    return [
        f"{name}: {size / sizes.total():.1%} of the lines"
        for name, size in sizes.items()
        if size > MAX_PACKAGE * sizes.total()
    ]


RULES = [large_packages, wrong_directions, unplaced, cycles, too_long, distributed_elsewhere]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule):
    assert rule(package_sources()) == []


PLANTED = [
    (wrong_directions, {"fsdpctl.plan.layout": "from fsdpctl.engine.unit import ShardedUnit"}),
    (wrong_directions, {"fsdpctl.engine.unit": "import fsdpctl.optim.adamw"}),
    (wrong_directions, {"fsdpctl.plan.layout": "from .units import UnitSpec"}),
    (wrong_directions, {"fsdpctl.comm.collectives": "def f():\n    import fsdpctl.engine.unit"}),
    (unplaced, {"fsdpctl.utils.misc": ""}),
    (large_packages, {"fsdpctl.plan.a": "x = 1\n" * 16, "fsdpctl.comm.flat_shard": "x = 1\n" * 84}),
    (
        cycles,
        {
            "fsdpctl.plan.a": "import fsdpctl.plan.b",
            "fsdpctl.plan.b": "def f():\n    import fsdpctl.plan.a",
        },
    ),
    (too_long, {"fsdpctl.plan.a": "x = 1\n" * 401}),
    (too_long, {"fsdpctl.plan.a": "def f():\n" + "    x = 1\n" * 41}),
    (too_long, {"fsdpctl.plan.a": "def f(a, b, c, d, *, e, f, g, h): ..."}),
    (distributed_elsewhere, {"fsdpctl.engine.unit": "import torch.distributed as dist"}),
    (distributed_elsewhere, {"fsdpctl.optim.record": "from torch import distributed"}),
    (distributed_elsewhere, {"fsdpctl.training.trainer": "from torch.distributed import barrier"}),
]


@pytest.mark.parametrize(("rule", "sources"), PLANTED)
def test_the_rule_finds_a_planted_fault(rule, sources):
    assert rule(sources)


def modules_without_torch() -> list[str]:
    return [
        module
        for module in package_sources()
        if module == "fsdpctl"
        or layer_of(module) in WITHOUT_TORCH
        or (layer_of(module) == "commands" and not module.startswith(COMMANDS_WITH_TORCH))
        or module in TOOLS_WITHOUT_TORCH
    ]


def imports_torch(statement: str) -> bool:
    code = f"import sys\n{statement}\nsys.exit('torch' in sys.modules)"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 1


def test_the_command_line_and_the_plan_import_no_torch():
    assert not imports_torch("\n".join(f"import {name}" for name in modules_without_torch()))


def test_an_import_of_torch_would_be_noticed():
    assert imports_torch("sys.modules['torch'] = sys")  # like an import, but faster


def test_the_page_draws_the_layers():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    drawn = page.split("checks:\n\n")[1].split("\n\n")[0].splitlines()
    assert [set(line.strip().split("   ")[0].split()) for line in drawn] == LAYERS[::-1]
