"""Findings on adapters and their base, and on which programs read those of experts.

Note: who reads adapters of experts. This was read on AS_OF in the sources of vLLM and PEFT, and in
threads about adapters that were lost in silence: vllm#50252, vllm#41384, sglang#27381,
unsloth#5410, Automodel#1814.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsdpctl.checkpoint.findings import Finding, change_of, compare_values, kind_of
from fsdpctl.checkpoint.manifest import PARAMETER, tensor_key
from fsdpctl.checkpoint.pretrained import open_weights
from fsdpctl.checkpoint.source import FileTensors, Tensors, read_floats
from fsdpctl.checkpoint.tensor_file import open_tensor_file
from fsdpctl.config.any_decoder import family_of
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PREFIX
from fsdpctl.errors import first_of
from fsdpctl.io.untrusted import read_json
from fsdpctl.models.products import transposed_layers
from fsdpctl.models.registry import build_plain
from fsdpctl.models.stacked_experts import matrices_of, stacked_experts
from fsdpctl.plan.layout import Span

AS_OF = "2026-11-29"
_ELEMENTS = 1 << 20  # of a weight, read at a time
_HALF = re.compile(r"(?P<layer>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
_PER_EXPERT = re.compile(r"(?P<experts>.*\bexperts)\.(?P<number>\d+)\.\w+")
_OF_EXPERTS = re.compile(r".*\bexperts\.(?!\d).*lora_\w+(\.weight)?")
_STACKED, _APART = "stacked (PEFT's target_parameters)", "a pair of matrices for each expert"
# Families whose classes in vLLM have is_3d_moe_weight, and one that loses these adapters.
_STACKED_IN_VLLM, _LOST_IN_VLLM = ("gpt_oss", "qwen3_5_moe", "qwen3_vl_moe"), "gemma4"
_MERGE = f"--merge exports a model that needs no such support ({AS_OF})"


class _Layer(NamedTuple):
    """A weight of the base that an adapter is added to."""

    weight: str
    width: int
    out: int
    experts: int = 1


class _Pair(NamedTuple):
    """An adapter: the names of its tensors, and the layer that it is added to."""

    down: str
    up: str
    layer: _Layer
    form: str = ""  # of experts


class _Base:
    """The layers that adapters can be added to."""

    def __init__(self, model: ModelConfig) -> None:
        self.family = family_of(model)
        plain = build_plain(model)
        transposed, params = (
            transposed_layers(plain),
            plain.named_parameters(remove_duplicate=False),
        )
        self.params = {name: tuple(each.shape) for name, each in params}
        self.layers: dict[str, list[_Layer]] = defaultdict(list)
        for name, shape in self.params.items():
            layer = name.removesuffix(".weight")
            if len(shape) == 2 and layer != name:
                out, width = shape[::-1] if layer in transposed else shape
                self.layers[layer] = [_Layer(name, width, out)]
        for name, each in stacked_experts(plain):
            for weight in (f"{name}.{word}" for word in matrices_of(each)):
                count, *sizes = self.params[weight]
                width, out = sizes if each.is_transposed else sizes[::-1]
                self.layers[name].append(_Layer(weight, width, out, count))

    def target(self, name: str, down: list[int], up: list[int]) -> tuple[_Layer, str] | str:
        """Return the layer of an adapter of these shapes and its form, or why it has none."""
        apart = _PER_EXPERT.fullmatch(name)
        known = self.layers.get(apart["experts"] if apart else name.replace(".base_layer", ""), [])
        if not known:
            return "the base has no such layer"
        (rank, width), (out, columns) = down, up
        for each in known:
            fits = out in (each.out, each.out // 2) if apart else out == each.out
            if fits and width == each.width and rank == columns and apart:
                return _Layer(each.weight, width, out), _APART
            if fits and width == each.width and rank == columns and rank % each.experts == 0:
                return each, _STACKED if each.experts > 1 else ""
        if any(not apart and (out, width) == (x.width, x.out) != (x.out, x.width) for x in known):
            return "in and out are swapped, as PEFT 0.18 wrote them and later versions do not read"
        shapes = " or ".join(f"{x.width} to {x.out}" for x in known)
        experts = f" for {known[0].experts} experts" if known[0].experts > 1 else ""
        return f"shapes {down} and {up} do not fit the base, {shapes}{experts}"


def findings_on_adapters(
    export: Path, model: ModelConfig, *, has_weights: bool
) -> Iterator[Finding]:
    """Compare adapters with their base, whose weights need not be here."""
    base, about = _Base(model), read_json(export / ADAPTER_CONFIG, dict[str, Any])
    file = open_tensor_file(export / ADAPTER_WEIGHTS)
    found = FileTensors(export, {name: (file, entry) for name, entry in file.entries.items()})
    pairs, whole, problems = _sorted(found, base)
    for (kind, reason), names in problems.items():
        yield Finding(kind, f"{first_of(names, 2)}: {reason}", is_lost=True)
    yield from _of_experts(pairs, base)
    yield from _targets(about, pairs, base)
    ranks = {found.info(tensor_key(PARAMETER, x.down)).shape[0] // x.layer.experts for x in pairs}
    if others := ranks - {about.get("r"), *(about.get("rank_pattern") or {}).values()}:
        yield Finding(
            ADAPTER_CONFIG, f"r={about.get('r')}, not {first_of([*map(str, others)])}", True
        )
    theirs = open_weights(model) if has_weights else None
    yield from _products(found, pairs, about, theirs)
    saved = {ours: (file, file.entries[name]) for ours, name in whole.items()}
    yield from compare_values(FileTensors(export, saved), theirs)
    if not pairs and not whole:
        yield Finding("adapters", "none for a layer of the base", is_lost=True)


def _sorted(
    found: FileTensors, base: _Base
) -> tuple[list[_Pair], dict[str, str], dict[tuple[str, str], list[str]]]:
    """Return the adapters, the parameters saved whole, and the names that have a problem."""
    halves: dict[str, dict[str, str]] = defaultdict(dict)
    problems: dict[tuple[str, str], list[str]] = defaultdict(list)
    pairs, whole = list[_Pair](), dict[str, str]()
    for name in found.names(PARAMETER):
        inner, shape = name.removeprefix(PREFIX), found.info(tensor_key(PARAMETER, name)).shape
        param = inner.replace(".modules_to_save", "")
        if inner == name:
            problems["adapters", f"not below {PREFIX[:-1]}, so PEFT does not read it"].append(name)
        elif (match := _HALF.fullmatch(inner)) and len(shape) == 2:
            halves[match["layer"]][match["half"]] = name
        elif _OF_EXPERTS.fullmatch(inner):
            reason = f"a form that PEFT and vLLM do not read (Automodel#1814); {_MERGE}"
            problems["experts", reason].append(inner)
        elif param in base.params:
            whole[param] = name
        elif not inner.endswith(".original_module.weight"):
            reason = "neither LoRA nor a parameter of the base"
            problems["adapters", reason].append(inner)
    for layer, names in halves.items():
        if len(names) < 2:
            problems[kind_of(layer), f"only lora_{min(names)}"].append(layer)
            continue
        shapes = [found.info(tensor_key(PARAMETER, names[half])).shape for half in "AB"]
        target = base.target(layer, *shapes)
        if isinstance(target, str):
            problems[kind_of(layer), target].append(layer)
        else:
            pairs.append(_Pair(names["A"], names["B"], *target))
    return pairs, whole, problems


def _of_experts(pairs: Collection[_Pair], base: _Base) -> Iterator[Finding]:
    """Count the adapted experts, and name the programs that read adapters of their form."""
    for form in (_STACKED, _APART):
        adapted: dict[str, set[str]] = defaultdict(set)  # matrices, or experts, by layer
        for each in pairs:
            if each.form == form:
                layer = each.layer.weight.rpartition(".")[0]
                match = _PER_EXPERT.match(each.down.removeprefix(PREFIX))
                adapted[layer].add(match["number"] if match else each.layer.weight)
        if not adapted:
            continue
        counts = {base.layers[layer][0].experts for layer in adapted}
        text = f"adapters of {max(counts)} experts in {len(adapted)} layers, {form}"
        yield Finding("experts", f"{text}: {_readers(form, base.family)}; {_MERGE}")
        for layer, here in adapted.items():
            count = base.layers[layer][0].experts if form == _APART else len(base.layers[layer])
            if len(here) < count:
                what = "experts" if form == _APART else "matrices, and vLLM requires all"
                text = f"{layer}: adapters of {len(here)} of {count} {what}"
                yield Finding("experts", text, is_lost=form == _APART)


def _readers(form: str, family: str) -> str:
    is_stacked = family.startswith(_STACKED_IN_VLLM)
    if form == _APART:
        how = "with --enable-mixed-moe-lora-format" if is_stacked else "as it is"
        return f"vLLM reads it {how}, SGLang too"
    how = "vLLM reads it" if is_stacked else (
        "vLLM reads it with --enable-mixed-moe-lora-format and is_3d_lora_weight"
    )  # fmt: skip
    how = "vLLM ignores it (vllm#50252)" if family.startswith(_LOST_IN_VLLM) else how
    return f"PEFT 0.19 and later read it, {how}, SGLang may ignore it (sglang#27381)"


def _targets(about: dict[str, Any], pairs: Collection[_Pair], base: _Base) -> Iterator[Finding]:
    """Compare the targets in adapter_config.json with the base and the adapters."""
    adapted = {each.layer.weight for each in pairs}
    names = {_HALF.fullmatch(each.down.removeprefix(PREFIX))["layer"] for each in pairs}  # type: ignore[index]
    has_all = not any(about.get(x) for x in ("layers_to_transform", "exclude_modules"))
    weights = {layer: [x.weight for x in each] for layer, each in base.layers.items()}
    params = {name: [name] for name in base.params}
    for key, known in (("target_modules", weights), ("target_parameters", params)):
        targets, unknown, lacking = about.get(key) or (), list[str](), list[str]()
        for target in targets if isinstance(targets, list) else ():
            of_target = [x for name, each in known.items() for x in each if _ends(name, target)]
            lacks = [each for each in of_target if each not in adapted]
            if not of_target and not any(_ends(name, target) for name in names):
                unknown.append(target)
            elif has_all or len(lacks) == len(of_target):
                lacking += lacks
        if unknown:
            text = f"{key}: the base has no {first_of(unknown)}"
            yield Finding(ADAPTER_CONFIG, text, is_lost=True)
        if lacking:
            text = f"{key}: no adapters of {len(lacking)} weights: {first_of(lacking, 2)}"
            yield Finding(ADAPTER_CONFIG, text, is_lost=True)


def _ends(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def _products(
    found: FileTensors, pairs: Collection[_Pair], about: dict[str, Any], theirs: Tensors | None
) -> Iterator[Finding]:
    """Compute by how much each kind of layer changes, without the products of matrices."""
    rank, alpha = float(about.get("r") or 1), float(about.get("lora_alpha") or 0)
    scale = alpha / (rank**0.5 if about.get("use_rslora") else rank)
    by_kind: dict[str, list[_Pair]] = defaultdict(list)
    for pair in pairs:
        by_kind[kind_of(pair.layer.weight)].append(pair)
    for kind, of_kind in by_kind.items():
        delta = norm = 0.0
        zero, bad, idle = list[str](), list[str](), 0
        for pair in of_kind:
            squares = _squares_of_product(found, pair)
            if not np.isfinite(squares).all():
                bad.append(pair.down)
            elif not squares.any():
                zero.append(pair.layer.weight)
            else:
                idle += int((squares == 0).sum())
            delta += scale**2 * float(np.nan_to_num(squares).sum())
            if theirs is not None:
                norm += _squares(theirs, tensor_key(PARAMETER, pair.layer.weight))
        if bad:
            yield Finding(kind, f"NaN or infinite in {first_of(bad, 2)} or lora_B", is_lost=True)
        if zero:
            text = f"{len(zero)} adapters whose product is zero: {first_of(zero, 2)}"
            yield Finding(kind, text, is_lost=True)
        idles = f"; the product is zero for {idle} experts" if idle else ""
        counts = len(of_kind) - len(zero), len(of_kind)
        yield change_of(kind, counts, (delta, norm), idles)


@np.errstate(all="ignore")  # of what is not finite
def _squares_of_product(found: FileTensors, pair: _Pair) -> NDArray[np.float64]:
    """Return the squared norm of the product, of each expert: a trace of small matrices."""
    (down, up), count = (_full(found, name) for name in (pair.down, pair.up)), pair.layer.experts
    into = down.reshape(count, -1, down.shape[1])
    back = up.reshape(len(up), -1, count).transpose(2, 1, 0)
    one, other = (each @ each.transpose(0, 2, 1) for each in (into, back))
    return np.asarray((one * other).sum(axis=(1, 2)), np.float64)


def _full(found: FileTensors, name: str) -> NDArray[np.float64]:
    key = tensor_key(PARAMETER, name)
    return read_floats(found, key).astype(np.float64).reshape(found.info(key).shape)


def _squares(weights: Tensors, key: str) -> float:
    spans = Span(0, weights.info(key).numel).cut(_ELEMENTS)
    return sum(float(np.linalg.norm(read_floats(weights, key, span))) ** 2 for span in spans)
