"""Findings on exported adapters and their base, and on the programs that read adapters of experts.

Note: evidence for what programs read: the code of vLLM and PEFT on _SOURCES_READ_ON, and issues
about adapters that programs ignore without an error: vllm#50252, vllm#41384, sglang#27381,
unsloth#5410, Automodel#1814.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsdpctl.checkpoint.findings import (
    Finding,
    WeightChange,
    compare_values,
    lost_finding,
    summarize_changes,
    tensor_kind,
)
from fsdpctl.checkpoint.manifest import PARAMETER, tensor_key
from fsdpctl.checkpoint.pretrained import open_weights
from fsdpctl.checkpoint.tensor_file import open_tensor_file
from fsdpctl.checkpoint.tensor_source import FileTensors, TensorSource, expert_factors, read_floats
from fsdpctl.config.decoder_config import model_type_of
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from fsdpctl.errors import CheckpointError, shorten_list
from fsdpctl.io.untrusted import Count, as_type, read_json
from fsdpctl.models.adapter_names import PEFT_PREFIX
from fsdpctl.models.build_model import build_base_model
from fsdpctl.models.linear_layers import transposed_layers
from fsdpctl.models.stacked_experts import expert_matrices, named_experts
from fsdpctl.plan.layout import Span

_SOURCES_READ_ON = "2026-11-29"
_ELEMENTS_AT_ONCE = 1 << 20
_LORA_MATRIX = re.compile(r"(?P<layer>.+)\.lora_(?P<matrix>[AB])(?:\.default)?\.weight")
_PER_EXPERT = re.compile(r"(?P<experts>.*\bexperts)\.(?P<index>\d+)\.\w+")
_OTHER_EXPERTS = re.compile(r".*\bexperts\.(?!\d).*lora_\w+(\.weight)?")
# Model types whose vLLM classes set is_3d_moe_weight, and one whose stacked adapters vLLM ignores.
_3D_IN_VLLM, _IGNORED_IN_VLLM = ("gpt_oss", "qwen3_5_moe", "qwen3_vl_moe"), "gemma4"
_MERGE = f"--merge avoids this (programs as of {_SOURCES_READ_ON})"


@dataclass(frozen=True, slots=True)
class _ComparedConfig:
    """The fields of adapter_config.json that are compared."""

    r: Count = 8
    lora_alpha: float = 8.0
    use_rslora: bool = False
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    rank_pattern: dict[str, int] | None = None
    layers_to_transform: Any = None
    exclude_modules: Any = None


class _BaseWeight(NamedTuple):
    """A weight of the base that an adapter is added to."""

    name: str
    in_features: int
    out_features: int
    num_experts: int = 1


class _Adapter(NamedTuple):
    """An adapter: the weight that it is added to, and the names of its two tensors."""

    base: _BaseWeight
    lora_a: str
    lora_b: str
    expert_index: str  # "" if the adapter is not of a single expert


class _AdapterTensors:
    """The tensors of a PEFT directory, matched with the weights of their base."""

    def __init__(self, export_dir: Path, model: ModelConfig) -> None:
        self._file = open_tensor_file(export_dir / ADAPTER_WEIGHTS)
        self.tensors = self._tensors_named(export_dir, {name: name for name in self._file.entries})
        # The names of tensors that match no weight, by kind and reason.
        self.problems: dict[tuple[str, str], list[str]] = defaultdict(list)
        base = build_base_model(model)
        self.shapes = {k: (*v.shape,) for k, v in base.named_parameters(remove_duplicate=False)}
        self.layers: dict[str, list[_BaseWeight]] = defaultdict(list)
        transposed = transposed_layers(base)
        for name, shape in self.shapes.items():
            if len(shape) == 2 and (layer := name.removesuffix(".weight")) != name:
                out_features, in_features = shape[::-1] if layer in transposed else shape
                self.layers[layer] = [_BaseWeight(name, in_features, out_features)]
        for name, experts in named_experts(base):
            for weight in (f"{name}.{matrix}" for matrix in expert_matrices(experts)):
                num_experts, *sizes = self.shapes[weight]
                size_in, size_out = sizes if experts.is_transposed else sizes[::-1]
                self.layers[name].append(_BaseWeight(weight, size_in, size_out, num_experts))
        lora_names, saved_modules = self._sort_names()
        self.saved_modules = self._tensors_named(export_dir, saved_modules)
        self.adapters = [x for layer, pair in lora_names.items() for x in self._match(layer, pair)]

    def _tensors_named(self, export_dir: Path, stored_names: dict[str, str]) -> FileTensors:
        file = self._file
        entries = {name: (file, file.entries[x]) for name, x in stored_names.items()}
        return FileTensors(export_dir, entries)

    def shape(self, name: str) -> list[int]:
        return self.tensors.info(tensor_key(PARAMETER, name)).shape

    def _sort_names(self) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
        """Return the names of A and B by layer, and of modules_to_save; others become problems."""
        lora_names: dict[str, dict[str, str]] = defaultdict(dict)
        saved_modules = {}
        for name in self.tensors.names(PARAMETER):
            inner = name.removeprefix(PEFT_PREFIX)
            param, reason = inner.replace(".modules_to_save", ""), ""
            if inner == name:
                reason = f"not below {PEFT_PREFIX[:-1]}, so PEFT does not read it"
            elif (match := _LORA_MATRIX.fullmatch(inner)) and len(self.shape(name)) == 2:
                lora_names[match["layer"]][match["matrix"]] = name
            elif _OTHER_EXPERTS.fullmatch(inner):
                reason = f"a form that PEFT and vLLM do not read (Automodel#1814); {_MERGE}"
            elif param in self.shapes:
                saved_modules[param] = name
            elif not inner.endswith(".original_module.weight"):
                reason = "neither LoRA nor a parameter of the base"
            if reason:
                self.problems["adapters", reason].append(inner)
        return lora_names, saved_modules

    def _match(self, layer: str, names: dict[str, str]) -> Iterator[_Adapter]:
        """Yield the adapter of a layer, or add a problem if it does not fit the base."""
        kind, per_expert = tensor_kind(layer), _PER_EXPERT.fullmatch(layer)
        base_layer = per_expert["experts"] if per_expert else layer.replace(".base_layer", "")
        weights = self.layers.get(base_layer)
        if len(names) < 2 or not weights:
            reason = "the base has no such layer" if not weights else f"only lora_{min(names)}"
            self.problems[kind, reason].append(layer)
            return
        (rank_a, size_in), (size_out, rank_b) = (self.shape(names[matrix]) for matrix in "AB")
        index = per_expert["index"] if per_expert else ""
        for base in weights:
            num_experts = 1 if per_expert else base.num_experts
            # gate_proj and up_proj of an expert are the halves of gate_up_proj.
            sizes = (base.out_features, base.out_features // (2 if per_expert else 1))
            fits = base.in_features == size_in and size_out in sizes
            if fits and rank_a == rank_b and rank_a and rank_a % num_experts == 0:
                weight = base._replace(num_experts=num_experts)
                yield _Adapter(weight, names["A"], names["B"], index)
                return
        expected = " or ".join(f"in {x.in_features}, out {x.out_features}" for x in weights)
        got = f"in {size_in}, out {size_out}, rank {rank_a} and {rank_b}"
        reason = f"lora_A and lora_B: expected {expected}, got {got}"
        stacked = [(x.out_features, x.in_features) for x in weights if x.num_experts > 1]
        if (size_in, size_out) in stacked and not per_expert:
            reason = "in and out are swapped; only PEFT 0.18 writes and reads this order"
        self.problems[kind, reason].append(layer)


def check_adapters(path: Path, model: ModelConfig, *, base_has_weights: bool) -> Iterator[Finding]:
    """Compare adapters with their base, and with its weights if these are available."""
    export, file = _AdapterTensors(path, model), path / ADAPTER_CONFIG
    content = read_json(file, dict[str, Any], error_type=CheckpointError)
    config = as_type(content, _ComparedConfig, str(file), CheckpointError)
    for (kind, reason), names in export.problems.items():
        yield lost_finding(kind, f"{shorten_list(names, 2)}: {reason}")
    yield from _check_experts(export, model_type_of(model))
    yield from _check_config(config, export)
    base = open_weights(model) if base_has_weights else None
    yield from _check_products(export, config, base)
    yield from compare_values(export.saved_modules, base)
    if not export.adapters and not export.saved_modules.names(PARAMETER):
        yield lost_finding("adapters", "none for a layer of the base")


def _check_experts(export: _AdapterTensors, model_type: str) -> Iterator[Finding]:
    """Count the adapted experts, and name the programs that read this form of adapters."""
    per_expert, stacked = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for adapter in export.adapters:
        layer = adapter.base.name.rpartition(".")[0]
        if adapter.expert_index:
            per_expert[layer].add(adapter.expert_index)
        elif adapter.base.num_experts > 1:
            stacked[layer].add(adapter.base.name)
    counts = {layer: export.layers[layer][0].num_experts for layer in (*per_expert, *stacked)}
    count = max(counts.values(), default=0)
    reads_3d = model_type.startswith(_3D_IN_VLLM)
    option = "with --enable-mixed-moe-lora-format"
    if stacked:
        support = "reads them" if reads_3d else f"reads them {option} and is_3d_lora_weight"
        if model_type.startswith(_IGNORED_IN_VLLM):
            support = "ignores them (vllm#50252)"
        text = f"adapters of {count} experts in {len(stacked)} layers, stacked (PEFT's "
        text += f"target_parameters): PEFT 0.19 reads them, vLLM {support}, SGLang may ignore them "
        yield Finding("experts", f"{text}(sglang#27381); {_MERGE}")
    if per_expert:
        text = f"adapters of {count} experts in {len(per_expert)} layers, two matrices each: "
        text += f"vLLM reads them{f' {option}' if reads_3d else ''}, SGLang too"
        yield Finding("experts", f"{text}; {_MERGE}")
    for layer, indices in per_expert.items():
        if len(indices) < (total := counts[layer]):
            yield lost_finding("experts", f"{layer}: adapters of {len(indices)} of {total} experts")
    for layer, matrices in stacked.items():
        if len(matrices) < (total := len(export.layers[layer])):
            text = f"{layer}: adapters of {len(matrices)} of {total} matrices"
            yield Finding("experts", f"{text}, and vLLM requires all")


def _check_config(config: _ComparedConfig, export: _AdapterTensors) -> Iterator[Finding]:
    """Compare adapter_config.json with the adapters and the base."""
    adapted = {adapter.base.name for adapter in export.adapters}
    names = (adapter.lora_a.removeprefix(PEFT_PREFIX) for adapter in export.adapters)
    adapted_layers = [name.partition(".lora_A")[0] for name in names]
    # Otherwise, these settings may exclude some layers that match a target, but not all.
    adapts_all = not config.layers_to_transform and not config.exclude_modules
    modules = {layer: [x.name for x in weights] for layer, weights in export.layers.items()}
    params = {name: [name] for name in export.shapes}
    for key, weights_by_name in (("target_modules", modules), ("target_parameters", params)):
        targets, unknown, unadapted = getattr(config, key), list[str](), list[str]()
        for target in targets if isinstance(targets, list) else ():
            groups = [names for name, names in weights_by_name.items() if _ends_with(name, target)]
            matches = [name for names in groups for name in names]
            remaining = [name for name in matches if name not in adapted]
            # Layers of single experts are not in `modules`.
            if not matches and not any(_ends_with(name, target) for name in adapted_layers):
                unknown.append(target)
            elif adapts_all or len(remaining) == len(matches):
                unadapted += remaining
        if unknown:
            yield lost_finding(ADAPTER_CONFIG, f"{key}: the base has no {shorten_list(unknown, 2)}")
        if unadapted:
            text = f"{key}: no adapters of {shorten_list(unadapted, 2)}"
            yield lost_finding(ADAPTER_CONFIG, text)
    ranks = {export.shape(x.lora_a)[0] // x.base.num_experts for x in export.adapters}
    if others := sorted(map(str, ranks - {config.r, *(config.rank_pattern or {}).values()})):
        text = f"r={config.r}: expected {shorten_list(others)}, the rank of the adapters"
        yield lost_finding(ADAPTER_CONFIG, text)


def _ends_with(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def _check_products(
    export: _AdapterTensors, config: _ComparedConfig, base: TensorSource | None
) -> Iterator[Finding]:
    """Compute how much each kind of layer changes, without forming the products B A."""
    rank = float(config.r or 1)  # layers in rank_pattern have another: approximate
    scale = config.lora_alpha / (rank**0.5 if config.use_rslora else rank)
    changes: dict[str, list[WeightChange]] = defaultdict(list)
    for adapter in export.adapters:
        kind, weight = tensor_kind(adapter.base.name), adapter.base.name
        squares = _squared_product_norms(export.tensors, adapter)
        num_zero = int((squares == 0).sum())
        if not np.isfinite(squares).all():
            yield lost_finding(kind, f"{weight}: NaN or infinite in its adapter")
        elif 0 < num_zero < len(squares):
            yield Finding(kind, f"{weight}: the product is zero for {num_zero} experts")
        norm = 0.0 if base is None else _squared_norm(base, tensor_key(PARAMETER, weight))
        change = scale**2 * float(np.nan_to_num(squares).sum())
        changes[kind].append(WeightChange(change, norm, weight))
    for kind, weight_changes in changes.items():
        if zero := [each.name for each in weight_changes if not each.squared_change]:
            names = shorten_list(zero, 2)
            yield lost_finding(kind, f"{len(zero)} adapters whose product is zero: {names}")
    yield from summarize_changes(changes)


@np.errstate(all="ignore")  # values may not be finite
def _squared_product_norms(weights: TensorSource, adapter: _Adapter) -> NDArray[np.float64]:
    """Return |B A|² = sum of (A Aᵀ) * (Bᵀ B), two rank x rank matrices, for each expert."""
    names = (adapter.lora_a, adapter.lora_b)
    factors = expert_factors(weights, *names, adapter.base.num_experts)
    lora_a, lora_b = (each.astype(np.float64) for each in factors)
    gram_a, gram_b = lora_a @ lora_a.transpose(0, 2, 1), lora_b.transpose(0, 2, 1) @ lora_b
    return np.asarray((gram_a * gram_b).sum(axis=(1, 2)), np.float64)


def _squared_norm(weights: TensorSource, key: str) -> float:
    spans = Span(0, weights.info(key).numel).split(_ELEMENTS_AT_ONCE)
    return sum(float(np.linalg.norm(read_floats(weights, key, span))) ** 2 for span in spans)
