"""The picture of the packages, drawn from their imports."""

import ast
from collections import defaultdict
from pathlib import Path

import fsdpctl

_ROOT = Path(fsdpctl.__file__).parent
_FILES = "errors"  # of the package itself, beside its packages


def rooms_picture() -> str:
    """Return the packages and their imports for Mermaid, without imports that follow from others.

    A package that imports another through a third one has no arrow of its own to it.
    """
    imported: dict[str, set[str]] = defaultdict(set)
    for file in sorted(_ROOT.glob("*/**/*.py")):
        room = file.relative_to(_ROOT).parts[0]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fsdpctl."):
                imported[room].add(str(node.module).split(".")[1])
        imported[room] -= {room, _FILES}

    def reached(room: str) -> set[str]:
        return imported[room].union(*map(reached, imported[room]))

    arrows = [
        f"    {room} --> {other}"
        for room in sorted(imported)
        for other in sorted(imported[room])
        if not any(other in reached(between) for between in imported[room])
    ]
    return "\n".join(["```mermaid", "graph TD", *arrows, "```"])
