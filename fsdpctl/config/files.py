"""The YAML files of the package: options in conf/, and recipes."""

import re
from collections.abc import Iterator
from pathlib import Path

import fsdpctl
from fsdpctl.io.documents import MIB
from fsdpctl.io.files import read_text_file

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def package_folder(name: str) -> Path:
    """Return the directory `conf` or `recipes`: within an installed package, else next to it."""
    package = Path(fsdpctl.__file__).parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def first_comment(file: Path) -> str:
    """Return the comment at the beginning of a YAML file, which describes it."""
    lines = []
    for line in read_text_file(file, MIB, follows=True).splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines)


def choices_of(group: str, config_dir: Path | None = None) -> list[str]:
    """Return the options of a group, including those in `config_dir`."""
    folders = [package_folder("conf"), *([config_dir] if config_dir else [])]
    return sorted({name for folder in folders for name in choices_below(folder / group)})


def choices_below(folder: Path) -> Iterator[str]:
    """Yield the names of the YAML files in `folder` that are valid options."""
    for file in folder.glob("*.yaml"):
        if file.is_file() and _NAME.fullmatch(file.stem) and file.stem != "null":
            yield file.stem
