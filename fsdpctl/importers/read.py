"""Detection of the tool that a configuration belongs to."""

from pathlib import Path

from fsdpctl.config.schema import GROUPS, SECTIONS
from fsdpctl.config.source_config import NO_TOML, SourceConfig, tool_of
from fsdpctl.errors import UsageError
from fsdpctl.importers.accelerate import read_accelerate
from fsdpctl.importers.automodel import read_automodel
from fsdpctl.importers.axolotl import read_axolotl
from fsdpctl.importers.translation import Translation
from fsdpctl.importers.trl import read_trl
from fsdpctl.io.untrusted import read_yaml

_READERS = {
    "axolotl": read_axolotl, "accelerate": read_accelerate, "TRL": read_trl,
    "Automodel": read_automodel,
}  # fmt: skip
_FUSED_NORMS = ("liger_rms_norm", "use_liger_kernel")
# Keys by which files of further tools are known.
_NOT_READ = {
    "stage": "LLaMA-Factory", "finetuning_type": "LLaMA-Factory", "actor_rollout_ref": "verl",
    "litgpt": "litgpt", "lr_warmup_fraction": "litgpt", "model._component_": "torchtune",
    "checkpointer._component_": "torchtune",
}  # fmt: skip
_EXPECTED = "expected the YAML file of axolotl, accelerate, TRL or Automodel"


def read_others(path: Path) -> Translation:
    """Translate another tool's configuration; UsageError if its training can't be estimated."""
    if path.suffix == ".toml":
        raise UsageError(f"{path}: {NO_TOML}")
    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{path}: not supported; {_EXPECTED}")
    source = SourceConfig(path, read_yaml(path))
    if (
        other := next((each for key, each in _NOT_READ.items() if key in source), None)
    ) is not None:
        raise UsageError(f"{path}: a file of {other}: not supported; {_EXPECTED}")
    if (tool := tool_of(source)) is not None:
        fused = any(each.key in _FUSED_NORMS and each.is_on for each in source.peek())
        found = _READERS[tool](source)
        if tool != "Automodel" and not fused and "engine.program" not in found.settings:
            found.map(None, "engine.program=transformers", default="(norms of transformers)")
        return found
    keys = {each.key for each in source.peek()}
    if keys and all(each.split(".")[0] in (*GROUPS, *SECTIONS) for each in keys):
        raise UsageError(f"{path}: is a recipe of fsdpctl; pass it as --recipe {path}")
    raise UsageError(f"{path}: unknown format; {_EXPECTED}")
