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
_NUMBERS = (0, 1, 17, 100)  # indices of blocks that an expression is tried on
_HEADS = ("lm_head", "embed_tokens", "embed_out", "wte", "embed_in", "output", "tok_embeddings")
_EXPRESSION = re.compile(r"[\\\[(|*+?^$]")


def quantized(dtype: str, *, experts: bool = False) -> tuple[str, ...]:
    """Return the settings of quantized frozen weights; bitsandbytes doesn't quantize experts."""
    return f"model.base_dtype={dtype}", f"model.quantize_experts={str(experts).lower()}"


def read_targets(target: Translation, value: SourceKey) -> None:
    """Translate the layers with adapters: a list, or an expression that matches whole names."""
    text = value.text.strip()
    if not _is_expression(value):
        target.map(value, f"model.lora.targets=[{','.join(value.items)}]")
        check_heads(target, value)
        return
    expression = None
    with (
        suppress(re.error, RecursionError, OverflowError),
        warnings.catch_warnings(action="ignore"),
    ):
        expression = re.compile(text)
    each = [_matched(expression, number) for number in _NUMBERS] if expression else [()]
    names = [name for layers in _LAYERS.values() for name in layers if any(name in x for x in each)]
    if not names:
        why = "matches no usual name" if expression else "not a regular expression"
        target.require("model.lora.targets", value, f"{why}; add model.lora.targets=REGEX")
        return
    note = "layers of the text model; other layers that match have no adapters"
    target.map(value, f"model.lora.targets=[{','.join(names)}]", note=note)
    if any(matched != each[0] for matched in each):
        target.exclude(value, f"adapters are estimated on all blocks; {TOO_HIGH}")


def read_stacked(
    target: Translation, stacked: SourceKey, targets: SourceKey | None, default: Sequence[str] = ()
) -> None:
    """Translate stacked parameters with adapters, and layers: `default`, else `targets`."""
    if targets and _is_expression(targets):
        why = "with lora_target_parameters; add model.lora.targets=[NAMES]"
        target.require("model.lora.targets", targets, why)
        return
    layers = default or (targets.items if targets else ())
    setting = f"model.lora.targets=[{','.join((*layers, *stacked.items))}]"
    target.map(stacked, setting, note="with the layers that have adapters")


def read_modules_to_save(target: Translation) -> None:
    """Translate the modules that are trained whole in addition to adapters."""
    if modules := target.source.take_enabled("lora_modules_to_save"):
        note = "an embedding and a head that are one parameter stay one"
        target.map(modules, f"model.lora.also=[{','.join(modules.items)}]", note=note)


def check_heads(target: Translation, value: SourceKey | None) -> None:
    """Refuse adapters of the output head or of embeddings, which fsdpctl does not support."""
    names = value.items if value else ()
    if heads := [each for each in names if each.rpartition(".")[2].strip("*") in _HEADS]:
        shown = SourceKey(value.key if value else "", heads[0])
        target.refuse(shown, "model.lora.targets", "has no adapters here")


def _matched(expression: re.Pattern[str], number: int) -> tuple[str, ...]:
    return tuple(
        name
        for part, names in _LAYERS.items()
        for name in names
        if any(expression.fullmatch(f"{block}.{number}.{part}.{name}") for block in _BLOCKS)
    )


def _is_expression(value: SourceKey) -> bool:
    return len(value.items) == 1 and _EXPRESSION.search(value.text.strip()) is not None
