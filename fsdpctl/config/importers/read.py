"""Detection of the tool that a configuration belongs to."""

from pathlib import Path

from fsdpctl.config.importers.accelerate import read_accelerate
from fsdpctl.config.importers.axolotl import read_axolotl
from fsdpctl.config.importers.source_config import NO_TOML, SourceConfig, tool_of
from fsdpctl.config.importers.translation import Translation
from fsdpctl.config.schema import GROUPS, SECTIONS
from fsdpctl.errors import UsageError
from fsdpctl.io.documents import read_yaml

_EXPECTED = "expected the YAML file of axolotl or accelerate"


def read_others(path: Path) -> Translation:
    """Translate the configuration of another tool.

    Raises:
        UsageError: If the tool isn't supported, or if its training can't be estimated.
    """
    if path.suffix == ".toml":
        raise UsageError(f"{path}: {NO_TOML}")
    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{path}: not supported; {_EXPECTED}")
    source = SourceConfig(path, read_yaml(path))
    if (tool := tool_of(source)) is not None:
        return {"axolotl": read_axolotl, "accelerate": read_accelerate}[tool](source)
    keys = {each.key for each in source.peek()}
    if keys and all(each.split(".")[0] in (*GROUPS, *SECTIONS) for each in keys):
        raise UsageError(f"{path}: is a recipe of fsdpctl; pass it as --recipe {path}")
    raise UsageError(f"{path}: unknown format; {_EXPECTED}")
