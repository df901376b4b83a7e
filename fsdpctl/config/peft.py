"""Adapters of the library PEFT: their names, and the settings in adapter_config.json."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpctl.errors import UsageError
from fsdpctl.io.documents import as_type, read_json

DOWN, UP = "lora_A", "lora_B"  # the layers of an adapter, B(A(x))
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_KEYS = tuple(f"model.lora.{name}" for name in ("rank", "alpha", "rslora"))
# Settings that change the computation; the only supported value is null, false, or empty.
_NOT_SUPPORTED = (
    "use_dora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern",
    "trainable_token_indices", "target_parameters", "megatron_config", "layer_replication",
    "use_qalora", "alora_invocation_tokens", "use_bdlora", "exclude_modules",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Adapters:
    """The fields of adapter_config.json that fsdpctl reads."""

    peft_type: str
    r: int
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    use_rslora: bool = False
    target_modules: list[str] | str | None = None
    bias: str = "none"


def adapter_words(path: str) -> dict[str, str]:
    """Return the settings (`model.lora.KEY`) of the adapters in `model.lora.path`.

    Raises:
        UsageError: If the directory has no adapters, or unsupported ones.
    """
    where = f"model.lora.path={path}"
    file = Path(path) / ADAPTER_CONFIG
    if not file.is_file():
        raise UsageError(f"{where}: {ADAPTER_CONFIG} not found; expected a PEFT directory")
    content = read_json(file, dict[str, Any])
    for name in _NOT_SUPPORTED:
        if content.get(name):
            raise UsageError(f"{where}: {name}={content[name]!r} is not supported")
    about = as_type(content, _Adapters, str(file))
    for name, value, only in (("peft_type", about.peft_type, "LORA"), ("bias", about.bias, "none")):
        if value != only:
            raise UsageError(f"{where}: {name}={value}: expected {only}")
    words = {
        "model.lora.rank": str(about.r),
        "model.lora.alpha": str(about.lora_alpha),
        "model.lora.dropout": str(about.lora_dropout),
        "model.lora.rslora": str(about.use_rslora).lower(),
    }
    if isinstance(about.target_modules, list):
        # PEFT matches each with a layer's whole name, or with its end. Regular expressions of
        # untrusted files are not run; the names of the tensors are checked instead.
        ends = "|".join(map(re.escape, sorted(about.target_modules)))
        words["model.lora.targets"] = rf"(^|\.)({ends})$"
    return words


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return name.endswith((f".{DOWN}.weight", f".{UP}.weight"))


def adapted_layers(names: Iterable[str]) -> list[str]:
    """Return the sorted names of the layers that have an adapter, from parameter names."""
    end = f".{DOWN}.weight"
    return sorted(name.removesuffix(end) for name in names if name.endswith(end))
