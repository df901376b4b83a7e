"""Recipes: YAML files of the very words one types, as `section.key: value` or nested."""

from collections.abc import Iterator
from pathlib import Path

import yaml

from fsdpctl.config.files import package_folder
from fsdpctl.errors import UsageError, nearest


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
    names = recipe_names()
    raise UsageError(
        f"--recipe {name}: no such recipe or file{nearest(name, names)} ({', '.join(names)})"
    )


def read_recipe(path: Path) -> list[tuple[str, str]]:
    """The recipe's words and values as if typed, in its order.

    Raises:
        UsageError: it is not a YAML mapping of words to plain values.
    """
    try:
        # Every value stays the text that it is, as on the command line.
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
        return list(_flatten(path, "", content))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{path}: not YAML: {' '.join(str(error).split())}") from None


def _flatten(path: Path, prefix: str, content: object) -> Iterator[tuple[str, str]]:
    if not isinstance(content, dict):
        raise UsageError(f"{path}: is no mapping of keys to values")
    for word, value in content.items():
        name = f"{prefix}{word}"
        if isinstance(value, dict):
            inner = dict(value)
            if "name" in inner:
                yield name, str(inner.pop("name"))
            yield from _flatten(path, f"{name}.", inner)
        elif isinstance(value, str):
            yield name, value
        else:
            raise UsageError(f"{path}: {name} has no plain value")
