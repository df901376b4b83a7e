"""The file of another tool, recognized by its keys and translated."""

from contextlib import suppress
from pathlib import Path

from fsdpctl.config.recipe import NO_TOML, tool_of
from fsdpctl.config.schema import GROUPS, SECTIONS
from fsdpctl.errors import UsageError
from fsdpctl.importers.accelerate import read_accelerate
from fsdpctl.importers.axolotl import read_axolotl
from fsdpctl.importers.source_config import SourceConfig
from fsdpctl.importers.translation import Translation, settings_of
from fsdpctl.importers.trl import read_trl
from fsdpctl.io.untrusted import read_yaml

_ACCELERATE = "accelerate"
_READERS = {"axolotl": read_axolotl, _ACCELERATE: read_accelerate, "TRL": read_trl}
_ALL_OF_LIGER = "use_liger_kernel"
_FUSED_NORMS = ("liger_rms_norm", _ALL_OF_LIGER)
_EXPECTED = "expected the YAML file of axolotl, accelerate or TRL"


def read_other_tool(path: Path, other: Path | None = None) -> Translation:
    """Translate a file of another tool; of two files, one is accelerate's.

    UsageError if the training can't be estimated, or if the two files aren't of one run.
    """
    tool, source = _open(path)
    if other is not None:
        other_tool, second = _open(other)
        if (tool == _ACCELERATE) == (other_tool == _ACCELERATE):
            expected = "axolotl or TRL" if tool == _ACCELERATE else _ACCELERATE
            why = f"a file of {other_tool}; with {path}, of {tool}, expected one of {expected}"
            raise UsageError(f"{other}: {why}")
        if tool == _ACCELERATE:
            tool, source, second = other_tool, second, source
        source = SourceConfig(source.file, source.content, second)
    fused = {each.key for each in source.peek() if each.key in _FUSED_NORMS and each.is_on}
    target = _READERS[tool](source)
    if "engine.program" in settings_of(target.emulated):
        return target
    if not fused:
        target.emulate("(norms)", "", "engine.program=transformers", "of transformers")
    elif _ALL_OF_LIGER in fused:
        target.emulate("(experts)", "", "engine.program=liger", "of Liger")
    return target


def is_accelerate(path: Path) -> bool | None:
    """Return whether a file is one of accelerate; None if it can't be read."""
    with suppress(UsageError):
        return _open(path)[0] == _ACCELERATE
    return None


def _open(path: Path) -> tuple[str, SourceConfig]:
    path = path.expanduser()
    if path.suffix == ".toml":
        raise UsageError(f"{path}: {NO_TOML}")
    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{path}: not supported; {_EXPECTED}")
    content = read_yaml(path)
    source = SourceConfig(path, content)
    if (tool := tool_of(path, content)) is not None:
        return tool, source
    keys = {each.key for each in source.peek()}
    if keys and all(each.split(".")[0] in (*GROUPS, *SECTIONS) for each in keys):
        raise UsageError(f"{path}: a recipe of fsdpctl; pass it as --recipe {path}")
    raise UsageError(f"{path}: unknown format; {_EXPECTED}")
