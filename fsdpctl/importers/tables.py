"""The tables of other tools in conf/tools.yaml: their defaults, and keys by what they change."""

from functools import cache
from typing import Any, cast

from fsdpctl.config.recipe import package_folder
from fsdpctl.io.untrusted import read_yaml


@cache
def _read_tools() -> dict[str, dict[str, Any]]:
    return cast(dict[str, dict[str, Any]], read_yaml(package_folder("conf") / "tools.yaml"))


def table(part: str, *tools: str) -> dict[str, str]:
    """Return a part with a text for each key; later `tools` take precedence."""
    return {key: text for tool in tools for key, text in _read_tools()[tool][part].items()}


def patterns(part: str, *tools: str) -> tuple[str, ...]:
    """Return a part with patterns of keys."""
    return tuple(each for tool in tools for each in _read_tools()[tool][part].split())
