"""Translation of PEFT's adapters: the layers that have adapters, and the frozen weights' dtype."""

import re
import warnings
from collections.abc import Sequence
from contextlib import suppress

from fsdpctl.importers.shared import TOO_HIGH
from fsdpctl.importers.source_config import SourceKey
from fsdpctl.importers.translation import Translation

# Linear layers of a decoder block.
_LAYERS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
# Names of the blocks in a model, also in multimodal models.
_BLOCKS = (
    "model.layers", "model.language_model.layers", "language_model.model.layers",
    "model.text_model.layers",
)  # fmt: skip
_BLOCK_INDICES = (0, 1, 17, 100)  # indices of blocks that an expression is tried on
_NO_LORA = (
    "lm_head",
    "embed_tokens",
    "embed_out",
    "wte",
    "embed_in",
    "output",
    "tok_embeddings",
)
_EXPRESSION = re.compile(r"[\\\[(|*+?^$]")


def quantized(dtype: str, *, experts: bool = False) -> tuple[str, ...]:
    """Return the settings of quantized frozen weights; bitsandbytes doesn't quantize experts."""
    return f"model.base_dtype={dtype}", f"model.quantize_experts={str(experts).lower()}"


def read_targets(target: Translation, value: SourceKey) -> None:
    """Translate the layers with adapters: a list, or an expression that matches whole names."""
    text = value.text.strip()
    if not _is_expression(value):
        target.add_row(value, f"model.lora.targets=[{','.join(value.items)}]")
        check_targets(target, value)
        return
    expression, not_supported = None, (re.error, RecursionError, OverflowError)
    with suppress(*not_supported), warnings.catch_warnings(action="ignore"):
        expression = re.compile(text)
    matches = [_matched(expression, number) for number in _BLOCK_INDICES] if expression else [()]
    layers = (layer for block_layers in _LAYERS.values() for layer in block_layers)
    names = [layer for layer in layers if any(layer in matched for matched in matches)]
    if not names:
        why = "matches no known layer" if expression else "not a regular expression"
        target.require("model.lora.targets", value, f"{why}; add model.lora.targets=REGEX")
        return
    note = "layers of the text model; other layers that match have no adapters"
    target.add_row(value, f"model.lora.targets=[{','.join(names)}]", note=note)
    if any(matched != matches[0] for matched in matches):
        target.exclude(value, f"adapters are estimated on all blocks; {TOO_HIGH}")


def read_stacked(
    target: Translation, stacked: SourceKey, targets: SourceKey | None, default: Sequence[str] = ()
) -> None:
    """Translate the stacked parameters and the layers (`default`, else `targets`) with adapters."""
    if targets and _is_expression(targets):
        why = "with lora_target_parameters; add model.lora.targets=[NAMES]"
        target.require("model.lora.targets", targets, why)
        return
    layers = default or (targets.items if targets else ())
    setting = f"model.lora.targets=[{','.join((*layers, *stacked.items))}]"
    target.add_row(stacked, setting, note="with the layers that have adapters")


def read_modules_to_save(target: Translation) -> None:
    """Translate the modules that are trained whole in addition to adapters."""
    if modules := target.source.take_enabled("lora_modules_to_save"):
        setting = f"model.lora.also=[{','.join(modules.items)}]"
        target.add_row(modules, setting, note="tied embeddings stay tied")


def check_targets(target: Translation, value: SourceKey | None) -> None:
    """Refuse adapters of the output head or of embeddings, which fsdpctl does not support."""
    names = value.items if value else ()
    if heads := [each for each in names if each.rpartition(".")[2].strip("*") in _NO_LORA]:
        shown_key = SourceKey(value.key if value else "", heads[0])
        target.refuse(shown_key, "model.lora.targets", "adapters of this layer are not supported")


def _matched(expression: re.Pattern[str], number: int) -> tuple[str, ...]:
    return tuple(
        name
        for part, names in _LAYERS.items()
        for name in names
        if any(expression.fullmatch(f"{block}.{number}.{part}.{name}") for block in _BLOCKS)
    )


def _is_expression(value: SourceKey) -> bool:
    return len(value.items) == 1 and _EXPRESSION.search(value.text.strip()) is not None
