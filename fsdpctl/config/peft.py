"""What the library PEFT calls adapters, and what its adapter_config.json says, in our words."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpctl.errors import UsageError
from fsdpctl.io.documents import as_type, read_json

DOWN, UP = "lora_A", "lora_B"  # of an adapter, which is B(A(x))
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_KEYS = tuple(f"model.lora.{name}" for name in ("rank", "alpha", "rslora"))
# What changes the computation, and has one value here: null, false, or empty.
_NOT_OFFERED = (
    "use_dora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern",
    "trainable_token_indices", "target_parameters", "megatron_config", "layer_replication",
    "use_qalora", "alora_invocation_tokens", "use_bdlora", "exclude_modules",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Adapters:
    """The fields that are read."""

    peft_type: str
    r: int
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    use_rslora: bool = False
    target_modules: list[str] | str | None = None
    bias: str = "none"


def adapter_words(path: str) -> dict[str, str]:
    """The adapters in `model.lora.path` as words (`model.lora.KEY`).

    Raises:
        UsageError: there are none, or of a kind that is not offered.
    """
    where = f"model.lora.path={path}"
    file = Path(path) / ADAPTER_CONFIG
    if not file.is_file():
        raise UsageError(f"{where}: there is no {ADAPTER_CONFIG} in it, as PEFT writes")
    content = read_json(file, dict[str, Any], follows=True)
    for name in _NOT_OFFERED:
        if content.get(name):
            raise UsageError(f"{where}: {name}={content[name]!r} is not offered")
    about = as_type(content, _Adapters, str(file))
    for name, value, only in (("peft_type", about.peft_type, "LORA"), ("bias", about.bias, "none")):
        if value != only:
            raise UsageError(f"{where}: {name}={value}: only {only} is offered")
    words = {
        "model.lora.rank": str(about.r),
        "model.lora.alpha": str(about.lora_alpha),
        "model.lora.dropout": str(about.lora_dropout),
        "model.lora.rslora": str(about.use_rslora).lower(),
    }
    if isinstance(about.target_modules, list):
        # PEFT takes each for a layer's whole name, or for its end. An expression of others is not
        # run here; what the tensors are called says whether ours is right.
        ends = "|".join(map(re.escape, sorted(about.target_modules)))
        words["model.lora.targets"] = rf"(^|\.)({ends})$"
    return words


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return name.endswith((f".{DOWN}.weight", f".{UP}.weight"))


def adapted_layers(names: Iterable[str]) -> list[str]:
    """The layers that have an adapter, of a model whose parameters have these names; sorted."""
    end = f".{DOWN}.weight"
    return sorted(name.removesuffix(end) for name in names if name.endswith(end))
