"""Linear layers of any class: how to recognize them, and how their weights are stored and read."""

import copy
import inspect
import re
from functools import cache
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from fsdpctl.models.adapter_names import EXPERT_ADAPTERS
from fsdpctl.models.quantized import FrozenLinear
from fsdpctl.models.stacked_experts import expert_matrices, named_experts

_OUT, _IN = 3, 2  # features of the layers that `_is_plain_linear` runs
# The name of a class that is not imported, since importing transformers takes seconds.
_TRANSPOSED = "transformers.pytorch_utils.Conv1D"
_READS_WEIGHT = re.compile(r"\bself\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|size))")


def weight_layout(layer: nn.Module) -> Literal["out_in", "in_out"] | None:
    """Return the order of dimensions of a linear layer's weight, or None for another module.

    A subclass of nn.Linear, such as Falcon's, is a linear layer if its forward returns the same as
    nn.Linear. The forward of a router, for example, returns more than a product.
    """
    if isinstance(layer, FrozenLinear):
        return "in_out" if layer.is_transposed else "out_in"
    if type(layer) is nn.Linear:
        return "out_in"
    cls: Any = type(layer)
    if f"{cls.__module__}.{cls.__name__}" == _TRANSPOSED:
        return "in_out"
    if not isinstance(layer, nn.Linear) or set(layer._parameters) != {"weight", "bias"}:
        return None
    return "out_in" if _is_plain_linear(cls, layer.bias is not None) else None


@cache
def _is_plain_linear(cls: Any, has_bias: bool) -> bool:
    """Return whether a subclass of nn.Linear computes the same as nn.Linear."""
    plain = nn.Linear(_IN, _OUT, bias=has_bias, device="cpu")
    layer = copy.copy(plain)
    layer.__class__ = cls
    with torch.device("cpu"), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for param in plain.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
        x = torch.randn(2, 4, _IN, generator=generator)
        try:
            output = layer(x)
        except Exception:  # forward requires more than a weight and a bias
            return False
        expected = F.linear(x, plain.weight, plain.bias)
        has_shape = isinstance(output, torch.Tensor) and output.shape == expected.shape
        return has_shape and bool(torch.allclose(output, expected, atol=1e-6))


def transposed_layers(module: nn.Module) -> frozenset[str]:
    """Return the names of linear layers and of adapters of experts whose weights are (in, out)."""
    stacked = (
        f"{name}{EXPERT_ADAPTERS}{matrix}"
        for name, experts in named_experts(module)
        if experts.is_transposed
        for matrix in expert_matrices(experts)
    )
    linear = (name for name, each in module.named_modules() if weight_layout(each) == "in_out")
    return frozenset((*linear, *stacked))


def layers_read_directly(module: nn.Module) -> set[str]:
    """Return the names of linear layers whose weight the parent module reads directly.

    The parent multiplies by the weight without calling the layer. An adapter of the layer would
    have no effect, and the parent would read quantized weights as bytes.
    """
    names = set()
    for name, owner in module.named_modules():
        if getattr(owner, "slow_but_exact", None) is False:  # Bloom then calls the layer
            continue
        cls: Any = type(owner)
        for child_name, layer in owner.named_children():
            if weight_layout(layer) and child_name in _names_read(cls):
                names.add(f"{name}.{child_name}" if name else child_name)
    return names


@cache
def _names_read(cls: Any) -> frozenset[str]:
    """Return the names of the children whose weight a class of a library reads in its methods."""
    if not cls.__module__.startswith(("transformers.", "torch.nn.")):
        return frozenset()
    sources = map(inspect.getsource, filter(inspect.isfunction, vars(cls).values()))
    return frozenset(name for source in sources for name in _READS_WEIGHT.findall(source))
