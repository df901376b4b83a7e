"""The settings of PEFT adapters, from adapter_config.json."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpctl.errors import UsageError
from fsdpctl.io.untrusted import as_type, read_json

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_KEYS = tuple(f"model.lora.{name}" for name in ("rank", "alpha", "rslora"))
# Keys of adapter_config.json that the computation does not depend on. PEFT, too, derives
# `fan_in_fan_out` from the layers. The other keys are about files or initialization.
_IRRELEVANT = (
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "loftq_config", "lora_ga_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
)  # fmt: skip
# Values of `init_lora_weights` that leave the base weights unchanged. Other initializations change
# them, so the file of the adapters alone would not describe the model.
_INITIALIZATIONS = ("true", "false", "none", "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class _AdapterConfig:
    """The fields of adapter_config.json that fsdpctl reads."""

    peft_type: str
    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    use_rslora: bool = False
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    modules_to_save: list[str] | None = None
    ensure_weight_tying: bool | None = None
    bias: str = "none"
    init_lora_weights: bool | str | None = True


def saves_tied_weights(path: str) -> bool:
    """Return whether adapters were saved with tied embeddings and output head."""
    return bool(_read_config(path).ensure_weight_tying)


def _read_config(path: str) -> _AdapterConfig:
    location = f"model.lora.path={path}"
    file = Path(path) / ADAPTER_CONFIG
    if not file.exists():
        raise UsageError(f"{location}: {ADAPTER_CONFIG} not found; expected a PEFT directory")
    content = read_json(file, dict[str, Any])
    config = as_type(content, _AdapterConfig, str(file))
    for name, expected in {"peft_type": "LORA", "bias": "none"}.items():
        if (value := getattr(config, name)) != expected:
            raise UsageError(f"{location}: {name}={value}: expected {expected}")
    if str(config.init_lora_weights).lower() not in _INITIALIZATIONS:
        raise UsageError(
            f"{location}: init_lora_weights={config.init_lora_weights}: not supported, because it "
            "may have changed the base weights or what is trained; save the adapters with PEFT's "
            "path_initial_model_for_weight_conversion, or merge them"
        )
    for name, value in content.items():
        is_unset = value in (None, "", [], {}) or value is False
        if not is_unset and name not in (*_AdapterConfig.__dataclass_fields__, *_IRRELEVANT):
            raise UsageError(f"{location}: {name}={str(value)[:80]}: not supported")
    return config


def adapter_settings(path: str) -> dict[str, str]:
    """Return the settings (`model.lora.KEY`) of the adapters in `model.lora.path`.

    UsageError if the directory has no adapters, or unsupported ones.
    """
    location, config = f"model.lora.path={path}", _read_config(path)
    settings = {
        "model.lora.rank": str(config.r),
        "model.lora.alpha": str(config.lora_alpha),
        "model.lora.dropout": str(config.lora_dropout),
        "model.lora.rslora": str(config.use_rslora).lower(),
    }
    modules = config.target_modules
    if isinstance(modules, list) or (modules is None and config.target_parameters):
        # A string would be a regular expression of an untrusted file: the names of tensors are
        # checked instead. As in PEFT, one listed module must exist, not all.
        targets = {*(modules or ()), *map(_layer_of_parameter, config.target_parameters or ())}
        settings["model.lora.targets"] = rf"(^|\.)({'|'.join(map(re.escape, sorted(targets)))})$"
    if modules_to_save := sorted({*(config.modules_to_save or ())}):
        # As in PEFT, a name also matches the end of a longer word: norm matches input_layernorm.
        settings["model.lora.also"] = f"({'|'.join(map(re.escape, modules_to_save))})$"
    if isinstance(modules, str) and config.target_parameters:
        problem = f"target_parameters with target_modules={str(modules)[:80]}"
        next_step = "set model.lora.targets to the names of all layers and experts"
        raise UsageError(f"{location}: {problem}: {next_step}")
    return settings


def _layer_of_parameter(name: str) -> str:
    """Return the layer of a name in target_parameters; for stacked experts, `experts.PARAMETER`."""
    layer = name.removesuffix(".weight")
    return layer if layer != name or "experts" in name else f"experts.{name}"


def has_adapters(folder: Path) -> bool:
    return any(os.path.lexists(folder / name) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS))


def notes_on_adapters(path: str | None, adapters: str | None) -> tuple[str, ...]:
    """Return a note if the directory of the model has adapters that the run does not read."""
    if path is None or adapters is not None or not has_adapters(Path(path)):
        return ()
    note = "only the weights of the model are read, not the adapters next to them"
    return (f"{path}: {note}; to train with these adapters, set model.lora.path={path}",)
