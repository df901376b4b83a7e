"""Finds phrases that this project does not use, in documents, messages, docstrings and comments.

    python -m tests.language [PATH …]

CONTRIBUTING.md has the rules. Code, fenced blocks and quoted identifiers are not read.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
# By kind of text: documents, messages, docstrings, comments, and comments of YAML.
EVERYWHERE = [
    r"\bfores(?:ee|een|ees|eeing|ight)\b",
    r"\b(?:is|are|was|were|be|been) (?:also |then )?(?:said|told)\b",
    r"\btold (?:of|what|where|that|so|about)\b",
    r"\bheed(?:s|ed|ing)?\b|\bmend(?:s|ed)?\b",
    r"\b(?:go|goes|gone|going) on\b|\bwent on\b(?! to)",
    r"\bst(?:ands?|ood) still\b",
    r"\bbeside\b",
    r"\banew\b|\bbut for\b|\bas ever\b|\bfor want of\b|\bin vain\b|\bto the letter\b|\bat hand\b",
    r"\b(?:nobody|somebody|whoever)\b",
    r"(?<!there )\b(?:is|are|was|were) (?:no|none)\b(?! (?:longer|more|fewer|less|larger))",
    r"\ballowed is\b|\boffered\b",
    r"\bso many\b|\bso much (?:of|is)\b|(?<!and )\bso (?:is|are|does|do|has|was|were)\b",
    r"\bcables?\b(?! pulled)|\bsigns? of life\b|\bliving (?:run|process)",
    r"\b(?:same|our own|our|its|their|those|typed) words\b|\bthe words of\b",
    r"\b(?:came|comes|come|becomes?|became) of\b|\bcame about\b",
    r"\bhow (?:it|a run|the run) stands?\b",
    r"\b(?:gives?|given|giving) back\b|\bin the place of\b|\bthat there (?:is|are)\b",
    r"\b(?:others|other tools|torch|transformers|Linux|PEFT|NCCL|nanoGPT|reference)"
    r" (?:have|has) it\b",
    r"\blies?\b",
    r"\bstands? (?:in|below|above|ready|over|once|between|ahead|alone|there|behind|on|out)\b",
    r"\bof (?:yours|ours|theirs)\b|\b(?:is|are|was|were) refused\b",
    r"\bends? with (?:exit )?(?:code )?\d|\bends? with (?:exit )?code\b",
    r"\d[\d.,]* ?(?:[kMGT]i?B|s|ms|[MGT]?FLOPs?|tokens/s|samples|elements|bytes)"
    r" a (?:rank|step|token|GPU|parameter|unit|host)\b",
]
IN_DOCUMENTS = [
    r"(?:^|[.;] |\| )(?:What|Whoever) (?:[\w/*.-]+ ){0,8}?"
    r"(?:is|are|was|does|has|goes|comes|fails|fits)\b",
    r"\d %",
]
IN_DOCSTRINGS = [
    r"^(?:Of|What|Those|That|As|Who|Where)\b", r"\bSee that\b", r"Raises: \w+: (?-i:[a-z])",
]  # fmt: skip
IN_COMMENTS = [r"^# (?:[Oo]f|by|[Ii]ts|[Ww]hose|[Ww]hich|[Tt]hose)\b"]
ALLOWED = {("docs/architecture.md", r"What")}  # headings of its table are questions
_CODE = re.compile(r"`[^`]*`|https?://\S+")


class Finding(NamedTuple):
    """A phrase, and where it is."""

    file: str
    line: int
    phrase: str


def findings(path: Path, source: str | None = None) -> Iterator[Finding]:
    """Yield all phrases in one file, or in `source` in its place."""
    name = path.relative_to(ROOT).as_posix()
    for line, text, kind in _texts(path, source or path.read_text(encoding="utf-8")):
        by_kind = {"document": IN_DOCUMENTS, "docstring": IN_DOCSTRINGS, "comment": IN_COMMENTS}
        extra = by_kind.get(kind, [])
        for pattern in (*EVERYWHERE, *extra):
            for match in re.finditer(pattern, text, re.IGNORECASE if pattern[0] != "^" else 0):
                phrase = match[0].strip(".;| ")
                if (name, phrase.split()[0]) not in ALLOWED:
                    yield Finding(name, line, phrase)


def _texts(path: Path, source: str) -> Iterator[tuple[int, str, str]]:
    """Yield each piece of prose with its line and kind."""
    if path.suffix == ".md":
        yield from ((line, text, "document") for line, text in _prose(source))
    elif path.suffix == ".py":
        yield from _of_python(source)
    else:
        for number, text in enumerate(source.splitlines(), 1):
            if "#" in text:
                yield number, text.partition("#")[2], "comment"


def _prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs, joined, and rows of tables, without code."""
    paragraph: list[str] = []
    began, in_code = 1, False
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        is_code = in_code or line.startswith("    ") or line.lstrip().startswith("```")
        if not is_code and line.strip() and not line.startswith(("|", "#", "- ")):
            began = began if paragraph else number
            paragraph.append(line.strip())
            continue
        if paragraph and not (line.startswith("- ") and not paragraph):
            yield began, _CODE.sub("`", " ".join(paragraph))
            paragraph = []
        if line.startswith("- "):
            began, paragraph = number, [line[2:].strip()]
        elif not is_code and line.startswith("|"):
            yield number, _CODE.sub("`", line)
    if paragraph:
        yield began, _CODE.sub("`", " ".join(paragraph))


def _of_python(source: str) -> Iterator[tuple[int, str, str]]:
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.add(id(first.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            kind = "docstring" if id(node) in docstrings else "message"
            text = " ".join(node.value.split()) if kind == "docstring" else node.value
            yield node.lineno, _CODE.sub("`", text), kind
    before = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            is_next = token.start[0] == before + 1 and token.line.lstrip().startswith("#")
            before = token.start[0]
            yield before, _CODE.sub("`", token.string), "continued" if is_next else "comment"


def files() -> list[Path]:
    """Return every file whose language is checked."""
    results = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
    results += sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "fsdpctl").rglob("*.py"))
    tops = (ROOT / "conf", ROOT / "recipes")
    return results + [each for top in tops for each in sorted(top.rglob("*.yaml"))]


def main() -> None:
    """Print the findings in the given files or directories."""
    chosen = [Path(each).resolve() for each in sys.argv[1:]]
    results = [
        each
        for path in files()
        if not chosen or any(path == top or top in path.parents for top in chosen)
        for each in findings(path)
    ]
    for each in results:
        print(f"{each.file}:{each.line}: {each.phrase}")
    print(len(results))


if __name__ == "__main__":
    main()
