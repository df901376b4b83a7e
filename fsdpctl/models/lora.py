"""The trained parameters of a model: all, selected ones, or low-rank adapters (LoRA) of layers.

Adapters follow Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021. Their
parameters have the names that PEFT uses.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdpctl.config.model import LoraConfig, ModelConfig
from fsdpctl.errors import UsageError, did_you_mean
from fsdpctl.models import stacked_experts
from fsdpctl.models.adapter_names import LORA_B
from fsdpctl.models.linear_layers import layers_read_directly, weight_layout
from fsdpctl.models.lora_dropout import dropout_linear
from fsdpctl.models.quantized import QUANT_FORMATS, FrozenLinear, QuantFormat, UninitializedLinear

TARGETS, TRAINABLE, FULLY_TRAINED = "model.lora.targets", "model.trainable", "model.lora.also"
_EXPERTS = "experts"
ALL_LINEAR = "all_linear"
_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")
_QUANTIFIER = re.compile(r"\{\d*,?\d*\}")  # a comma in {1,2} does not make a list
_LIST = re.compile(r"\[[^][]*\]|.*[\s,;'\"].*", re.DOTALL)


class LoraLinear(FrozenLinear):
    """A frozen linear layer with an adapter: W x + b + scale * B(A(dropout(x)))."""

    def __init__(self, base: nn.Module, config: LoraConfig) -> None:
        super().__init__(base, is_transposed=weight_layout(base) == "in_out")
        assert config.rank is not None
        self.scale = config.scale
        in_features, out_features = self.columns, self.rows
        if self.is_transposed:
            in_features, out_features = out_features, in_features
        self.dropout = config.dropout
        self.lora_A = UninitializedLinear(in_features, config.rank, bias=False, device="meta")
        self.lora_B = UninitializedLinear(config.rank, out_features, bias=False, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        drops = self.training and self.dropout > 0
        low_rank = dropout_linear(x, self.lora_A.weight, self.dropout) if drops else self.lora_A(x)
        return torch.add(super().forward(x), self.lora_B(low_rank), alpha=self.scale)


def init_adapter(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Initialize an adapter: A uniform in ±1 / sqrt(in), as in PEFT, and B with zeros."""
    if name.endswith(f".{LORA_B}.weight"):
        tensor.zero_()
        return
    bound = 1 / math.sqrt(tensor.shape[1])
    values = torch.empty(tensor.shape, dtype=torch.float32)
    tensor.copy_(values.uniform_(-bound, bound, generator=generator))


def set_trainable(module: nn.Module, config: ModelConfig) -> None:
    """Add adapters and freeze parameters in place; UsageError if a pattern matches nothing."""
    if config.lora.rank is None:
        if config.trainable is not None:
            _train_only(module, config.trainable)
        return
    trained = fully_trained_modules(module, config.lora.also)
    trained_params = [each for name in trained for each in module.get_submodule(name).parameters()]
    if config.base_dtype is not None:
        _quantize_layers(module, QUANT_FORMATS[config.base_dtype], config, trained)
    targets, stacked = _targets(module, config.lora, trained)
    if trained and not targets and not stacked:
        problem = f"conflicts with {TARGETS}={config.lora.targets}: no layer is left for adapters"
        raise UsageError(f"{FULLY_TRAINED}={config.lora.also}: {problem}")
    module.requires_grad_(False)
    for name, matrices in stacked.items():
        stacked_experts.add_adapters(module.get_submodule(name), matrices, config.lora)
    for name, base in targets.items():
        _replace(module, name, LoraLinear(base, config.lora))
    for param in trained_params:
        param.requires_grad_()


def _quantize_layers(
    module: nn.Module, quant_format: QuantFormat, config: ModelConfig, excluded: set[str]
) -> None:
    skipped = excluded | layers_read_directly(module)
    for name, base in list(_linear_layers(module)):
        if name not in skipped:
            frozen = FrozenLinear(base, is_transposed=weight_layout(base) == "in_out")
            frozen.quantize(quant_format)
            _replace(module, name, frozen)
    for name, experts in stacked_experts.named_experts(module):
        if config.quantize_experts and name not in excluded:
            stacked_experts.quantize_experts(name, experts, quant_format)


def _replace(module: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, key = name.rpartition(".")
    setattr(module.get_submodule(parent), key, layer)


def _train_only(module: nn.Module, text: str) -> None:
    name_filter = NameFilter.parse(TRAINABLE, text)
    names = [name for name, _ in module.named_parameters()]
    name_parts = {part for name in names for part in name.split(".")}
    name_filter.check(names, "parameter name", f"names are {names[0]} … {names[-1]}", name_parts)
    for name, param in module.named_parameters():
        param.requires_grad_(name_filter.matches(name))


def fully_trained_modules(module: nn.Module, text: str | None) -> set[str]:
    """Return the names of the modules that `model.lora.also` selects, and of their submodules."""
    if text is None:
        return set()
    name_filter = NameFilter.parse(FULLY_TRAINED, text, at_end=True)
    names = [name for name, each in module.named_modules() if name and [*each.parameters()]]
    leaf_names = dict.fromkeys(name.rpartition(".")[2] for name in names)
    leaves = [each for each in leaf_names if not each.isdigit()]
    name_filter.check(names, "module", f"modules are {', '.join(leaves)}", leaves)
    prefixes = tuple(f"{name}." for name in names if name_filter.matches(name))
    return {name for name in names if f"{name}.".startswith(prefixes)}


def _targets(
    module: nn.Module, config: LoraConfig, trained: Collection[str]
) -> tuple[dict[str, nn.Module], dict[str, list[str]]]:
    """Return the layers that get an adapter, by name, and the matrices of stacked experts.

    A pattern selects matrices of experts only if it names the experts, since matrices are named
    like layers (up_proj). As in PEFT, modules that are trained fully get no adapter.
    """
    layers, read_directly = dict(_linear_layers(module)), layers_read_directly(module)
    all_filters = NameFilter.parse(TARGETS, config.targets, at_end=True)
    name_filter, all_linear = all_filters.split_all_linear()
    if name_filter is None:  # only all_linear
        excluded = read_directly.union(trained)
        return {name: each for name, each in layers.items() if name not in excluded}, {}
    stacked = {
        name: [
            matrix
            for matrix in stacked_experts.expert_matrices(each)
            if any(name_filter.matches_because_of(_EXPERTS, x) for x in (name, f"{name}.{matrix}"))
        ]
        for name, each in stacked_experts.named_experts(module)
    }
    stacked = {name: each for name, each in stacked.items() if each and name not in trained}
    names = [*layers, *stacked, *(f"{name}.{each}" for name in stacked for each in stacked[name])]
    leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    valid = f"linear layers except the output head are {', '.join(leaves)}"
    name_filter.check(names, "linear layer", valid, [*leaves, ALL_LINEAR])
    implied = layers.keys() - read_directly if all_linear else set[str]()
    targets = {x: layers[x] for x in layers if x in implied or name_filter.matches(x)}
    if no_effect := sorted({name.rpartition(".")[2] for name in targets if name in read_directly}):
        raise UsageError(
            f"{TARGETS}={config.targets}: {', '.join(no_effect)}: not supported, because the "
            "model reads the weights without calling the layer; select other layers"
        )
    return {name: layer for name, layer in targets.items() if name not in trained}, stacked


def _linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all linear layers by name, except the output head.

    Merging an adapter of the head would change a tied embedding.
    """
    get_head = getattr(module, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    for name, each in module.named_modules():
        if each is not head and weight_layout(each):
            yield name, each


@dataclass(frozen=True, slots=True)
class NameFilter:
    """A list of names or a regular expression, which is the value of a setting.

    A list has commas, spaces or quotes, or is in brackets, as in YAML. Every other text is a
    regular expression that is searched in the names.
    """

    key: str
    text: str
    patterns: Mapping[str, re.Pattern[str]]  # key: name in the list, or `text`

    @staticmethod
    def parse(key: str, text: str, *, at_end: bool = False) -> "NameFilter":
        """Parse the value of a setting.

        With `at_end`, a name of a list matches only at the end of a module's name. UsageError
        if `text` is neither a list of names nor a regular expression.
        """
        if _LIST.fullmatch(_QUANTIFIER.sub("", text.strip())):
            names = _parse_names(key, text)
            return NameFilter(key, text, {x: re.compile(_pattern_for(x, at_end)) for x in names})
        try:
            return NameFilter(key, text, {text: re.compile(text)})
        except (re.error, OverflowError, RecursionError) as error:
            raise UsageError(f"{key}={text}: not a regular expression: {error}") from None

    def split_all_linear(self) -> tuple["NameFilter | None", bool]:
        """Return the filter without all_linear (None if empty), and whether it had all_linear."""
        normalized = {each: each.lower().replace("-", "_") for each in self.patterns}
        rest = {x: each for x, each in self.patterns.items() if normalized[x] != ALL_LINEAR}
        remaining = NameFilter(self.key, self.text, rest) if rest else None
        return remaining, len(rest) < len(normalized)

    def matches(self, name: str) -> bool:
        return any(each.search(name) for each in self.patterns.values())

    def matches_because_of(self, word: str, name: str) -> bool:
        """Return whether a pattern matches `name` and needs `word` for this match."""
        rest = name.replace(word, "")
        matches = [(each.search(name), each.search(rest)) for each in self.patterns.values()]
        # Without `word`, the pattern matches nothing, or another part of the name.
        return any(a and (b is None or a[0].replace(word, "") != b[0]) for a, b in matches)

    def check(self, names: Collection[str], kind: str, valid: str, known: Collection[str]) -> None:
        """Check that each pattern matches one of `names`, which are names of a `kind`.

        UsageError if a pattern has no match, with the nearest of the `known` names and `valid`.
        """
        for name, pattern in self.patterns.items():
            if not any(map(pattern.search, names)):
                text = f"{name} " if name != self.text else ""
                hint = did_you_mean(name, known)
                raise UsageError(f"{self.key}={self.text}: {text}matches no {kind}{hint}; {valid}")


def _parse_names(key: str, text: str) -> list[str]:
    parts = (each.strip(" \t'\"") for each in text.strip().strip("[]").split(","))
    names = list(dict.fromkeys(filter(None, parts)))
    invalid = next((name for name in names if not _NAME.fullmatch(name)), None)
    if names and invalid is None:
        return names
    problem = f"{invalid} in a list" if names else "empty"
    expected = "expected names such as q_proj,v_proj, or a regular expression such as q_proj|v_proj"
    raise UsageError(f"{key}={text}: {problem}; {expected}")


def _pattern_for(name: str, at_end: bool) -> str:
    if at_end:
        return rf"(?:^|\.){re.escape(name)}$"
    pattern = r"(?<!\d)" * name[0].isdigit() + re.escape(name)
    return pattern + r"(?!\d)" * name[-1].isdigit()  # layers.1 does not match layers.10
