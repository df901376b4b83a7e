"""The command lines that a reader finds: in pages, recipes, examples and the help of commands."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from fsdpctl.commands.app import COMMANDS

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = (
    "fsdpctl", "make", "python", "pip", "uv", "uvx", "pipx", "docker run", "torchrun", "sbatch",
    "srun", "kubectl", "sky",
)  # fmt: skip
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")))
HEADERS = tuple(
    sorted(str(p.relative_to(ROOT)) for at in ("recipes/*", "examples/*/*") for p in ROOT.glob(at))
)
HELP = "--help"  # the help of commands has examples
_ANY = "|".join(PROGRAMS)


@dataclass(frozen=True, slots=True)
class Line:
    """A command line and the file that shows it."""

    source: str
    text: str

    def __str__(self) -> str:
        return f"{self.source}: {self.text}"

    @property
    def args(self) -> list[str]:
        """Return the arguments that the shell passes, the program first."""
        return shlex.split(self.text.partition(" > ")[0])


def documented_lines() -> list[Line]:
    """Return the command lines of every source, in their order."""
    lines = []
    for source in (*PAGES, *HEADERS):
        read = in_page if source in PAGES else in_comments
        lines += [Line(source, text) for text in dict.fromkeys(read((ROOT / source).read_text()))]
    examples = [each for info in COMMANDS.values() for each in info.examples]
    return lines + [Line(HELP, f"fsdpctl {each}") for each in examples]


def in_page(text: str) -> Iterator[str]:
    """Yield the commands in the blocks and spans of a page of Markdown."""
    is_fenced = False
    marked = []  # whether the line belongs to a block, and its text
    for line in text.splitlines():
        if line.startswith("```"):
            is_fenced = not is_fenced
            marked.append((False, ""))
        else:
            is_block = is_fenced or line.startswith("    ")
            marked.append((is_block, line if is_fenced or not is_block else line[4:]))
    for is_block, lines in groupby(marked, key=lambda each: each[0]):
        part = [line for _, line in lines]
        yield from _in_block(part) if is_block else _in_spans(part)


def in_comments(text: str) -> Iterator[str]:
    """Yield the commands in the comments of YAML or a script: indented, after a colon, quoted."""
    comments = "\n".join(line[1:] for line in text.splitlines() if line.startswith("#"))
    lines = re.sub(r" \\\n\s*", " ", comments).splitlines()
    for line in lines:
        if match := re.fullmatch(rf"(?: {{3,}}|.*: )((?:{_ANY}) .*)", line):
            yield match[1]
    yield from _in_spans(lines)


def _in_block(lines: list[str]) -> Iterator[str]:
    """Yield the commands of a block; if it has prompts, its other lines are output."""
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    prompted = [line[2:] for line in joined if line.startswith("$ ")]
    for line in prompted or joined:
        if re.match(rf"(?:{_ANY}) ", command := re.sub(r"\s+#.*", "", line)):
            yield command


def _in_spans(lines: list[str]) -> Iterator[str]:
    for paragraph in "\n".join(lines).split("\n\n"):
        for span in re.findall(r"`([^`]+)`", paragraph.replace("\n", " ")):
            if re.match(rf"(?:{_ANY}) \S", span):
                yield span.replace("\\|", "|")
