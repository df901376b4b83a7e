"""The packages that fsdpctl requires: their versions, and how to install missing or old ones."""

import platform
import re
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsdpctl
from fsdpctl.errors import UsageError

_REQUIREMENT = re.compile(r"""([\w.-]+)([^;]*)(?:;.*extra *== *["'](\w+)["'])?""")
_NAMES = {"hydra": "hydra-core", "yaml": "pyyaml"}  # packages by module


def versions() -> dict[str, str]:
    libraries = {name: _version(name) for name in ("torch", "transformers")}
    return {"fsdpctl": fsdpctl.__version__, **libraries, "python": platform.python_version()}


def package_folder(name: str) -> Path:
    """Return the directory `conf` or `recipes`: within an installed package, else next to it."""
    package = Path(fsdpctl.__file__).parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def is_installed(module: str) -> bool:
    """Return whether a module is installed, not only a directory such as one that wandb leaves."""
    try:
        spec = find_spec(module)
    except ImportError:  # the parent package is missing
        return False
    return spec is not None and spec.origin is not None


def import_package(module: str, location: str) -> Any:
    """Import a package that only some commands need; UsageError at `location` if that fails."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(f"{location}: {install_hint(module, error)}") from None


def install_hint(module: str, error: ImportError | None = None) -> str:
    """Return the problem of a failed import, and the command that installs the package."""
    name = _NAMES.get(module, module)
    requirement, package = _requirement(name)
    if error is None or not (version := _version(name)):
        return f"{requirement} not installed; run `pip install '{package}'`"
    problem = f"{name} {version} cannot be imported ({' '.join(str(error).split()):.200})"
    return f"{problem}; run `pip install -U '{requirement}'`"


def _requirement(name: str) -> tuple[str, str]:
    """Return the requirement of a package, and what pip installs: the requirement, or an extra."""
    try:
        lines = metadata.requires("fsdpctl") or []
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        lines = []
    for match in filter(None, map(_REQUIREMENT.match, lines)):
        if match[1].replace("_", "-") == name.replace("_", "-") and match[3] != "dev":
            requirement = match[1] + match[2].strip()
            return requirement, f"fsdpctl[{match[3]}]" if match[3] else requirement
    return name, name


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
