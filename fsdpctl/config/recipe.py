"""Recipes: YAML files of the very words one types, as `section.key: value` or nested."""

import shlex
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from fsdpctl.config.files import package_folder
from fsdpctl.config.schema import GROUPS, KEYS
from fsdpctl.errors import UsageError, nearest
from fsdpctl.io.documents import read_yaml

_MOST_WORDS = 10_000  # aliases make few lines into many
_MOST_DEEP = 8


def recipe_names() -> list[str]:
    """The recipes that come with fsdpctl."""
    return sorted(file.stem for file in package_folder("recipes").glob("*.yaml"))


def find_recipe(name: str) -> Path:
    """The file of a recipe, given by its name or as a path.

    Raises:
        UsageError: there is none.
    """
    if name in recipe_names():
        return package_folder("recipes") / f"{name}.yaml"
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.suffix:
        raise UsageError(f"{name}: no such file")
    names = recipe_names()
    raise UsageError(
        f"--recipe {name}: no such recipe or file{nearest(name, names)} ({', '.join(names)})"
    )


def read_recipe(path: Path) -> list[tuple[str, str]]:
    """The recipe's words and values as if typed, in its order.

    Raises:
        UsageError: it is not a YAML mapping of words to plain values.
    """
    return words_in(path, read_yaml(path))


def refuse_commands(
    recipe: str, words: Sequence[tuple[str, str]], typed: Sequence[tuple[str, str]]
) -> None:
    """See that a recipe, which may be somebody else's, says nothing that would be executed.

    Raises:
        UsageError: it does, and it is not typed too.
    """
    said = {name for name, _ in typed}
    for name, text in words:
        if name in KEYS and KEYS[name].is_executed and name not in said:
            raise UsageError(
                f"{recipe}: {name}: what is executed is typed, not read from files; if it is "
                f"yours, type {name}={shlex.quote(text)}"
            )


def words_in(path: Path, content: object) -> list[tuple[str, str]]:
    """The words and values in `content`, which is the YAML of `path`, as `read_recipe`."""
    words = list(islice(_flatten(path, "", content), _MOST_WORDS + 1))
    if len(words) > _MOST_WORDS:
        raise UsageError(f"{path}: more than {_MOST_WORDS} words")
    return words


def _flatten(path: Path, prefix: str, content: object) -> Iterator[tuple[str, str]]:
    if not isinstance(content, dict):
        raise UsageError(f"{path}: is no mapping of keys to values")
    if prefix.count(".") >= _MOST_DEEP:
        raise UsageError(f"{path}: {prefix[:80]} is nested too deeply")
    for word, value in content.items():
        name = f"{prefix}{word}"
        if isinstance(value, dict):
            inner = dict(value)
            if "name" in inner:
                yield name, str(inner.pop("name"))
            yield from _flatten(path, f"{name}.", inner)
        elif isinstance(value, str):
            yield name, value
        elif name in KEYS or name in GROUPS:
            raise UsageError(f"{path}: {name} has no plain value")
        else:
            yield name, ""  # which is no word of ours
