"""Count the small mistakes in the code that the fast tests detect.

    python -m benchmarks.mutants --count 100 --out benchmarks/results/mutants.json
    python -m benchmarks.mutants --tree ../before --out before.json     # another checkout

Each mutant is a copy of the checkout in which one operator, number, condition or call of a room
differs, drawn by the seed. The room's fast tests run on it; a mutant that passes them survives.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report import write_report

ROOT = Path(__file__).parent.parent
# The rooms that are mutated, and the directories of tests that protect them.
ROOMS = {
    "engine": ("engine", "optim", "torch_engines"),
    "plan": ("plan", "engine", "predict", "memory", "timing"),
    "checkpoint": ("checkpoint",),
    "config": ("config", "resolve", "commands/test_first_minutes.py", "commands/test_estimate.py"),
    "data": ("data", "chats"),
}
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change, and whether a test failed."""

    room: str
    file: str
    line: int
    change: str
    is_killed: bool = False


def changes(tree: ast.Module) -> Iterator[tuple[int, str, ast.AST]]:
    """Yield each change that can be made: its line, a description, and the node to change."""
    annotations = {
        id(each)
        for node in ast.walk(tree)
        for field in ("annotation", "returns")
        if isinstance(part := getattr(node, field, None), ast.AST)
        for each in ast.walk(part)
    }
    for node in ast.walk(tree):
        if id(node) in annotations:
            continue
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
            yield node.lineno, "comparison", node
        elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
            yield node.lineno, "operator", node
        elif isinstance(node, ast.BoolOp):
            yield node.lineno, "and/or", node
        elif isinstance(node, ast.If | ast.IfExp):
            yield node.lineno, "condition", node
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield node.lineno, "number", node
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node.lineno, "call", node


def change(node: ast.AST) -> None:
    """Make the change in place."""
    if isinstance(node, ast.Compare):
        node.ops[0] = COMPARED[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp):
        node.op = COMPUTED[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.If | ast.IfExp):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        node.value += 1
    elif isinstance(node, ast.Expr):
        node.value = ast.Constant(None)


def drawn(tree: Path, count: int, seed: int) -> list[tuple[Mutant, str]]:
    """Draw mutants, as many of each room; return each with its source."""
    results = []
    for index, room in enumerate(ROOMS):
        random_of = random.Random(f"{seed} {room}")
        files = sorted((tree / "fsdpctl" / room).rglob("*.py"))
        for _ in range((count + index) // len(ROOMS)):
            while True:
                file = random_of.choice(files)
                module = ast.parse(file.read_text(encoding="utf-8"))
                if places := list(changes(module)):
                    break
            line, kind, node = random_of.choice(places)
            change(node)
            name = file.relative_to(tree).as_posix()
            source = ast.unparse(ast.fix_missing_locations(module))
            results.append((Mutant(room, name, line, kind), source))
    return results


def tried(tree: Path, drawn_one: tuple[Mutant, str], limit: float) -> Mutant:
    """Run the room's tests on a copy of the checkout with the mutant."""
    mutant, source = drawn_one
    tests = [f"tests/{each}" for each in ROOMS[mutant.room] if (tree / "tests" / each).exists()]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(tree, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs"))
        (copy / mutant.file).write_text(source, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return Mutant(**{**asdict(mutant), "is_killed": True})
    return Mutant(**{**asdict(mutant), "is_killed": done.returncode == 1})


def main() -> None:
    """Draw mutants, try each, and write which survived."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of one mutant")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    tree = options.tree.resolve()
    mutants: list[Mutant] = []
    to_try = drawn(tree, options.count, options.seed)
    random.Random(options.seed).shuffle(to_try)  # so that a run cut short is a sample of all rooms
    with ThreadPoolExecutor(options.jobs) as pool:
        for each in pool.map(lambda one: tried(tree, one, options.limit), to_try):
            mutants.append(each)
            what = "found" if each.is_killed else "survived"
            print(f"{what}: {each.file}:{each.line}: {each.change}", flush=True)
            write_report(options.out, "mutants", [*map(asdict, mutants)], seed=options.seed)
    print(f"{sum(each.is_killed for each in mutants)} of {len(mutants)} were found")


if __name__ == "__main__":
    main()
