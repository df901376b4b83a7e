"""Findings on exported adapters and their base, and on the programs that read adapters of experts.

Note: which programs read adapters of experts. The sources of vLLM and PEFT were read on _AS_OF, and
issues about adapters that were ignored without an error: vllm#50252, vllm#41384, sglang#27381,
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
from fsdpctl.checkpoint.tensor_source import FileTensors, TensorSource, read_floats
from fsdpctl.config.decoder_config import model_type_of
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from fsdpctl.errors import CheckpointError, shorten_list
from fsdpctl.io.untrusted import Count, as_type, read_json
from fsdpctl.models.adapter_names import PEFT_PREFIX
from fsdpctl.models.build_model import build_base_model
from fsdpctl.models.linear_layers import transposed_layers
from fsdpctl.models.stacked_experts import expert_matrices, stacked_experts
from fsdpctl.plan.layout import Span

_AS_OF = "2026-11-29"
_ELEMENTS_AT_ONCE = 1 << 20  # of a weight, which are read at a time
_LORA_MATRIX = re.compile(r"(?P<layer>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
_PER_EXPERT = re.compile(r"(?P<experts>.*\bexperts)\.(?P<number>\d+)\.\w+")
_OTHER_EXPERTS = re.compile(r".*\bexperts\.(?!\d).*lora_\w+(\.weight)?")
# Families whose classes in vLLM set is_3d_moe_weight; a family whose stacked adapters vLLM ignores.
_STACKED_IN_VLLM, _LOST_IN_VLLM = ("gpt_oss", "qwen3_5_moe", "qwen3_vl_moe"), "gemma4"
_MERGE = f"--merge exports a model that needs no such support ({_AS_OF})"


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
    width: int
    out: int
    experts: int = 1


class _Adapter(NamedTuple):
    """An adapter: the weight that it is added to, and the names of its two tensors."""

    base: _BaseWeight
    down: str
    up: str
    expert: str  # the number of the expert, if each expert has its own adapter, or ""


class _AdapterTensors:
    """The tensors of a PEFT directory, matched with the weights of their base."""

    def __init__(self, export: Path, model: ModelConfig) -> None:
        """Read the header of the file.

        `problems` has the names of tensors that match no weight, by kind and reason.
        """
        self._file = open_tensor_file(export / ADAPTER_WEIGHTS)
        self.tensors = self._tensors_named(export, {name: name for name in self._file.entries})
        self.problems: dict[tuple[str, str], list[str]] = defaultdict(list)
        plain = build_base_model(model)
        self.shapes = {k: (*v.shape,) for k, v in plain.named_parameters(remove_duplicate=False)}
        self.layers: dict[str, list[_BaseWeight]] = defaultdict(list)
        transposed = transposed_layers(plain)
        for name, shape in self.shapes.items():
            if len(shape) == 2 and (layer := name.removesuffix(".weight")) != name:
                out, width = shape[::-1] if layer in transposed else shape
                self.layers[layer] = [_BaseWeight(name, width, out)]
        for name, each in stacked_experts(plain):
            for weight in (f"{name}.{word}" for word in expert_matrices(each)):
                count, *sizes = self.shapes[weight]
                width, out = sizes if each.is_transposed else sizes[::-1]
                self.layers[name].append(_BaseWeight(weight, width, out, count))
        halves, fully_trained = self._sort_names()
        self.whole = self._tensors_named(export, fully_trained)  # of modules_to_save
        self.adapters = [x for layer, names in halves.items() for x in self._match(layer, names)]

    def _tensors_named(self, export: Path, names: dict[str, str]) -> FileTensors:
        file = self._file
        return FileTensors(export, {ours: (file, file.entries[x]) for ours, x in names.items()})

    def shape(self, name: str) -> list[int]:
        return self.tensors.info(tensor_key(PARAMETER, name)).shape

    def _sort_names(self) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
        halves: dict[str, dict[str, str]] = defaultdict(dict)
        fully_trained = {}
        for name in self.tensors.names(PARAMETER):
            inner = name.removeprefix(PEFT_PREFIX)
            param, reason = inner.replace(".modules_to_save", ""), ""
            if inner == name:
                reason = f"not below {PEFT_PREFIX[:-1]}, so PEFT does not read it"
            elif (match := _LORA_MATRIX.fullmatch(inner)) and len(self.shape(name)) == 2:
                halves[match["layer"]][match["half"]] = name
            elif _OTHER_EXPERTS.fullmatch(inner):
                reason = f"a form that PEFT and vLLM do not read (Automodel#1814); {_MERGE}"
            elif param in self.shapes:
                fully_trained[param] = name
            elif not inner.endswith(".original_module.weight"):
                reason = "neither LoRA nor a parameter of the base"
            if reason:
                self.problems["adapters", reason].append(inner)
        return halves, fully_trained

    def _match(self, layer: str, names: dict[str, str]) -> Iterator[_Adapter]:
        """Yield the adapter of a layer, or add a problem if the base has no such layer."""
        kind, per_expert = tensor_kind(layer), _PER_EXPERT.fullmatch(layer)
        weights = self.layers.get(
            per_expert["experts"] if per_expert else layer.replace(".base_layer", "")
        )
        if len(names) < 2 or not weights:
            reason = "the base has no such layer" if not weights else f"only lora_{min(names)}"
            self.problems[kind, reason].append(layer)
            return
        (rank, width), (out, columns) = (self.shape(names[half]) for half in "AB")
        for each in weights:
            experts = 1 if per_expert else each.experts
            sizes = (each.out, each.out // 2) if per_expert else (each.out,)  # of gate_up_proj
            if (
                (rank or None) == columns
                and (width, rank % experts) == (each.width, 0)
                and out in sizes
            ):
                target = _BaseWeight(each.name, width, out, experts)
                yield _Adapter(
                    target, names["A"], names["B"], per_expert["number"] if per_expert else ""
                )
                return
        shapes = " or ".join(f"{x.width} to {x.out}" for x in weights)
        reason = f"{width} to {out}, rank {rank} and {columns}, do not fit the base, {shapes}"
        if (
            any(x.experts > 1 and (out, width) == (x.width, x.out) for x in weights)
            and not per_expert
        ):
            reason = (
                "in and out are swapped, as PEFT 0.18 wrote them and later versions do not read"
            )
        self.problems[kind, reason].append(layer)


def check_adapters(export: Path, model: ModelConfig, *, has_weights: bool) -> Iterator[Finding]:
    """Compare adapters with their base; `has_weights` if the base's weights are available."""
    adapters, file = _AdapterTensors(export, model), export / ADAPTER_CONFIG
    content = read_json(file, dict[str, Any], error_type=CheckpointError)
    config = as_type(content, _ComparedConfig, str(file), CheckpointError)
    for (kind, reason), names in adapters.problems.items():
        yield lost_finding(kind, f"{shorten_list(names, 2)}: {reason}")
    yield from _check_experts(adapters, model_type_of(model))
    yield from _check_settings(config, adapters)
    theirs = open_weights(model) if has_weights else None
    yield from _check_products(adapters, config, theirs)
    yield from compare_values(adapters.whole, theirs)
    if not adapters.adapters and not adapters.whole.names(PARAMETER):
        yield lost_finding("adapters", "none for a layer of the base")


def _check_experts(adapters: _AdapterTensors, family: str) -> Iterator[Finding]:
    """Count the adapted experts, and name the programs that read this form of adapters."""
    per_expert, stacked = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for each in adapters.adapters:
        layer = each.base.name.rpartition(".")[0]
        if each.expert:
            per_expert[layer].add(each.expert)
        elif each.base.experts > 1:
            stacked[layer].add(each.base.name)
    counts = {layer: adapters.layers[layer][0].experts for layer in (*per_expert, *stacked)}
    most = max(counts.values(), default=0)
    is_3d = family.startswith(_STACKED_IN_VLLM)
    mixed = "with --enable-mixed-moe-lora-format"
    if stacked:
        how = "reads it" if is_3d else f"reads it {mixed} and is_3d_lora_weight"
        how = "ignores it (vllm#50252)" if family.startswith(_LOST_IN_VLLM) else how
        text = f"adapters of {most} experts in {len(stacked)} layers, stacked (PEFT's "
        text += f"target_parameters): PEFT 0.19 reads it, vLLM {how}, SGLang may ignore it "
        yield Finding("experts", f"{text}(sglang#27381); {_MERGE}")
    if per_expert:
        text = f"adapters of {most} experts in {len(per_expert)} layers, two matrices each: "
        text += "vLLM reads it"
        yield Finding("experts", f"{text}{f' {mixed}' * is_3d}, SGLang too; {_MERGE}")
    for layer, here in (*per_expert.items(), *stacked.items()):
        count = counts[layer] if layer in per_expert else len(adapters.layers[layer])
        what = "experts" if layer in per_expert else "matrices, and vLLM requires all"
        if len(here) < count:
            text = f"{layer}: adapters of {len(here)} of {count} {what}"
            yield Finding("experts", text, is_lost=layer in per_expert)


def _check_settings(config: _ComparedConfig, adapters: _AdapterTensors) -> Iterator[Finding]:
    """Compare adapter_config.json with the adapters and the base."""
    pairs = adapters.adapters
    adapted = {each.base.name for each in pairs}
    names = [x.down.removeprefix(PEFT_PREFIX).partition(".lora_A")[0] for x in pairs]
    has_all = not config.layers_to_transform and not config.exclude_modules
    modules = {layer: [x.name for x in each] for layer, each in adapters.layers.items()}
    params = {name: [name] for name in adapters.shapes}
    for key, known in (("target_modules", modules), ("target_parameters", params)):
        targets, unknown, lacking = getattr(config, key), list[str](), list[str]()
        for target in targets if isinstance(targets, list) else ():
            of_target = [
                x for name, each in known.items() for x in each if _ends_with(name, target)
            ]
            lacks = [each for each in of_target if each not in adapted]
            if not of_target and not any(_ends_with(name, target) for name in names):
                unknown.append(target)
            elif has_all or len(lacks) == len(of_target):
                lacking += lacks
        for what, which in (("the base has no", unknown), ("no adapters of", lacking)):
            if which:
                yield lost_finding(ADAPTER_CONFIG, f"{key}: {what} {shorten_list(which, 2)}")
    ranks = {adapters.shape(x.down)[0] // x.base.experts for x in pairs}
    if others := sorted(map(str, ranks - {config.r, *(config.rank_pattern or {}).values()})):
        yield lost_finding(ADAPTER_CONFIG, f"r={config.r}, not {shorten_list(others)}")


def _ends_with(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def _check_products(
    adapters: _AdapterTensors, config: _ComparedConfig, theirs: TensorSource | None
) -> Iterator[Finding]:
    """Compute how much each kind of layer changes, without forming the products B A."""
    rank = float(config.r or 1)
    scale = config.lora_alpha / (rank**0.5 if config.use_rslora else rank)
    changes: dict[str, list[WeightChange]] = defaultdict(list)
    for pair in adapters.adapters:
        kind, weight = tensor_kind(pair.base.name), pair.base.name
        squares = _squared_product_norms(adapters.tensors, pair)
        idle = int((squares == 0).sum())
        if not np.isfinite(squares).all():
            yield lost_finding(kind, f"{weight}: NaN or infinite in its adapter")
        elif 0 < idle < len(squares):
            yield Finding(kind, f"{weight}: the product is zero for {idle} experts")
        norm = 0.0 if theirs is None else _squared_norm(theirs, tensor_key(PARAMETER, weight))
        delta = scale**2 * float(np.nan_to_num(squares).sum())
        changes[kind].append(WeightChange(delta, norm, weight))
    for kind, of_kind in changes.items():
        if zero := [each.name for each in of_kind if not each.delta]:
            yield lost_finding(
                kind, f"{len(zero)} adapters whose product is zero: {shorten_list(zero, 2)}"
            )
    yield from summarize_changes(changes)


@np.errstate(all="ignore")  # values may not be finite
def _squared_product_norms(weights: TensorSource, pair: _Adapter) -> NDArray[np.float64]:
    """Return the squared norm of B A for each expert, as the trace of a small matrix."""
    keys = [tensor_key(PARAMETER, name) for name in (pair.down, pair.up)]
    down, up = (
        read_floats(weights, key).astype(np.float64).reshape(weights.info(key).shape)
        for key in keys
    )
    into = down.reshape(pair.base.experts, -1, down.shape[1])
    back = up.reshape(len(up), -1, pair.base.experts).transpose(2, 1, 0)
    one, other = (each @ each.transpose(0, 2, 1) for each in (into, back))
    return np.asarray((one * other).sum(axis=(1, 2)), np.float64)


def _squared_norm(weights: TensorSource, key: str) -> float:
    spans = Span(0, weights.info(key).numel).split(_ELEMENTS_AT_ONCE)
    return sum(float(np.linalg.norm(read_floats(weights, key, span))) ** 2 for span in spans)
