"""Packages that fsdpctl requires: their versions, and how to install one that is missing or old."""

import platform
import re
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import fsdpctl
from fsdpctl.errors import UsageError

_REQUIREMENT = re.compile(r"""([\w.-]+)([^;]*)(?:;.*extra *== *["'](\w+)["'])?""")
_NAMES = {"hydra": "hydra-core", "yaml": "pyyaml"}  # of packages, by module


def versions() -> dict[str, str]:
    found = {name: _version(name) for name in ("torch", "transformers")}
    return {"fsdpctl": fsdpctl.__version__, **found, "python": platform.python_version()}


def package_folder(name: str) -> Path:
    """Return the directory `conf` or `recipes`: within an installed package, else next to it."""
    package = Path(fsdpctl.__file__).parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def import_package(package: str, location: str) -> Any:
    """Import a package that only some commands need; `where` begins the UsageError if it fails."""
    try:
        return import_module(package)
    except ImportError as error:
        raise UsageError(f"{location}: {install_hint(package, error)}") from None


def install_hint(module: str, error: ImportError | None = None) -> str:
    """Return what an import of a module lacks, and the command that installs it."""
    name = _NAMES.get(module, module)
    needed, installs = _requirement(name)
    if error is None or not (found := _version(name)):
        return f"{needed} not installed; run `pip install '{installs}'`"
    reason = " ".join(str(error).split())
    return f"{name} {found} cannot be imported ({reason:.200}); run `pip install -U '{needed}'`"


def _requirement(name: str) -> tuple[str, str]:
    try:
        lines = metadata.requires("fsdpctl") or []
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        lines = []
    for found in filter(None, map(_REQUIREMENT.match, lines)):
        if found[1].replace("_", "-") == name.replace("_", "-") and found[3] != "dev":
            needed = found[1] + found[2].strip()
            return needed, f"fsdpctl[{found[3]}]" if found[3] else needed
    return name, name


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
