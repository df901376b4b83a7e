"""Which tool a configuration is of, and what it means."""

from pathlib import Path

from fsdpctl.config.importers.accelerate import is_accelerate, read_accelerate
from fsdpctl.config.importers.axolotl import is_axolotl, read_axolotl
from fsdpctl.config.importers.said import Said
from fsdpctl.config.importers.torchtitan import is_torchtitan, read_torchtitan
from fsdpctl.config.importers.translation import Translation
from fsdpctl.config.schema import GROUPS, SECTIONS
from fsdpctl.errors import UsageError
from fsdpctl.io.documents import read_toml, read_yaml

_READ = "axolotl (YAML), torchtitan (TOML) and accelerate (YAML) are read"
_TEXTS = {".yaml": read_yaml, ".yml": read_yaml, ".toml": read_toml}


def read_others(path: Path) -> Translation:
    """The configuration of another tool in our words.

    Raises:
        UsageError: it is of none that is read, or trains in a way that cannot be estimated.
    """
    if path.suffix == ".py":
        raise UsageError(
            f"{path}: a program, as torchtitan's configurations are since version 0.3, and is not "
            f"executed; {_READ}"
        )
    if path.suffix not in _TEXTS:
        raise UsageError(f"{path}: {_READ}")
    said = Said(path, _TEXTS[path.suffix](path))
    if path.suffix == ".toml":
        if is_torchtitan(said):
            return read_torchtitan(said)
    elif is_axolotl(said):
        return read_axolotl(said)
    elif is_accelerate(said):
        return read_accelerate(said)
    elif _is_ours(said):
        raise UsageError(f"{path}: in our own words; `--recipe {path}` reads it")
    raise UsageError(f"{path}: of none of the tools whose configurations are understood: {_READ}")


def _is_ours(said: Said) -> bool:
    keys = {each.key for each in said.peek()}
    return bool(keys) and all(each.split(".")[0] in (*GROUPS, *SECTIONS) for each in keys)
