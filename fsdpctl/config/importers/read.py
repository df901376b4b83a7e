"""Detection of the tool that a configuration belongs to."""

from pathlib import Path

from fsdpctl.config.importers.accelerate import is_accelerate, read_accelerate
from fsdpctl.config.importers.axolotl import is_axolotl, read_axolotl
from fsdpctl.config.importers.source_config import SourceConfig
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
    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{path}: not supported; {_EXPECTED}")
    source = SourceConfig(path, read_yaml(path))
    if is_axolotl(source):
        return read_axolotl(source)
    if is_accelerate(source):
        return read_accelerate(source)
    keys = {each.key for each in source.peek()}
    if keys and all(each.split(".")[0] in (*GROUPS, *SECTIONS) for each in keys):
        raise UsageError(f"{path}: is a recipe of fsdpctl; pass it as --recipe {path}")
    raise UsageError(f"{path}: unknown format; {_EXPECTED}")
