"""Layers that multiply by a matrix: which they are, how they store it, and who reads it."""

import copy
import inspect
import re
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fsdpctl.models.adapter_names import EXPERT_ADAPTERS
from fsdpctl.models.quantized import FrozenLinear
from fsdpctl.models.stacked_experts import expert_matrices, stacked_experts

_OUT, _IN = 3, 2  # of the layers that are tried
_TRANSPOSED = "transformers.pytorch_utils.Conv1D"  # named: importing transformers takes seconds
_READS_WEIGHT = re.compile(r"\bself\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|size))")


def is_transposed(layer: nn.Module) -> bool | None:
    """Return whether the weight of a linear layer is (in, out); None if it isn't a linear layer.

    Of a subclass of torch's layer, such as Falcon's, the forward is tried. That of a router, for
    example, returns more than a product.
    """
    if isinstance(layer, FrozenLinear):
        return layer.is_transposed
    if type(layer) is nn.Linear:
        return False
    kind: Any = type(layer)
    if f"{kind.__module__}.{kind.__name__}" == _TRANSPOSED:
        return True
    if not isinstance(layer, nn.Linear) or set(layer._parameters) != {"weight", "bias"}:
        return None
    return False if _is_plain_linear(kind, layer.bias is not None) else None


@cache
def _is_plain_linear(kind: Any, has_bias: bool) -> bool:
    """Return whether the forward of a subclass is that of torch's layer."""
    plain = nn.Linear(_IN, _OUT, bias=has_bias, device="cpu")
    tried = copy.copy(plain)
    tried.__class__ = kind
    with torch.device("cpu"), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for param in plain.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
        x = torch.randn(2, 4, _IN, generator=generator)
        try:
            found = tried(x)
        except Exception:  # it needs more than a weight and a bias
            return False
        expected = F.linear(x, plain.weight, plain.bias)
        return (
            isinstance(found, torch.Tensor)
            and found.shape == expected.shape
            and bool(torch.allclose(found, expected, atol=1e-6))
        )


def transposed_layers(module: nn.Module) -> frozenset[str]:
    """Return the names of the linear layers, and of adapters of experts, with weights (in, out)."""
    stacked = (
        f"{name}{EXPERT_ADAPTERS}{word}"
        for name, experts in stacked_experts(module)
        if experts.is_transposed
        for word in expert_matrices(experts)
    )
    linear = (name for name, each in module.named_modules() if is_transposed(each))
    return frozenset((*linear, *stacked))


def layers_read_directly(module: nn.Module) -> set[str]:
    """Return the names of linear layers whose weight the code of the module above reads.

    It multiplies by the weight without calling the layer: adapters would have no effect there, and
    packed weights would be read as bytes.
    """
    found = set()
    for name, owner in module.named_modules():
        if getattr(owner, "slow_but_exact", None) is False:  # Bloom's, which then reads none
            continue
        kind: Any = type(owner)
        for word, layer in owner.named_children():
            if is_transposed(layer) is not None and word in _names_read(kind):
                found.add(f"{name}.{word}" if name else word)
    return found


@cache
def _names_read(kind: Any) -> frozenset[str]:
    if not kind.__module__.startswith(("transformers.", "torch.nn.")):
        return frozenset()
    methods = filter(inspect.isfunction, vars(kind).values())
    return frozenset(
        word for each in methods for word in _READS_WEIGHT.findall(inspect.getsource(each))
    )
