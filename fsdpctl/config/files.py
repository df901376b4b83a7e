"""Where the YAML files lie that come with fsdpctl."""

import re
from collections.abc import Iterator
from pathlib import Path

import fsdpctl
from fsdpctl.io.documents import MIB
from fsdpctl.io.files import read_text_file

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def package_folder(name: str) -> Path:
    """The folder `conf` or `recipes`: inside an installed package, else beside it."""
    package = Path(fsdpctl.__file__).parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def first_comment(file: Path) -> str:
    """The comment that a YAML file begins with: what it is."""
    lines = []
    for line in read_text_file(file, MIB, follows=True).splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines)


def choices_of(group: str, config_dir: Path | None = None) -> list[str]:
    """The choices of a group, those in `config_dir` included."""
    folders = [package_folder("conf"), *([config_dir] if config_dir else [])]
    return sorted({name for folder in folders for name in choices_below(folder / group)})


def choices_below(folder: Path) -> Iterator[str]:
    """The YAML files in `folder` whose names can be typed as a choice."""
    for file in folder.glob("*.yaml"):
        if file.is_file() and _NAME.fullmatch(file.stem) and file.stem != "null":
            yield file.stem
