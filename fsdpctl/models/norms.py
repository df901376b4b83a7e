"""Root mean square norms of transformers' models, computed by torch's operator.

transformers computes them in five operators, and keeps two results in float32 for backward. Torch's
keeps its input: without recomputation, a dense model needs a fifth less memory for activations.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_WIDTH = 8  # of the norms that are tried
_known: dict[tuple[object, ...], type | None] = {}


class _Norm(nn.Module):
    """The forward of norms that scale each vector to unit root mean square."""

    def forward(self, x: Tensor) -> Tensor:
        norm: Any = self
        return F.rms_norm(x, (x.shape[-1],), norm._parameters.get("weight"), _epsilon_of(norm))


class _NormPlusOne(nn.Module):
    """The same for norms that store their weights less one, as Gemma's."""

    def forward(self, x: Tensor) -> Tensor:
        norm: Any = self
        return F.rms_norm(x, (x.shape[-1],), 1 + norm.weight, _epsilon_of(norm))


def fuse_norms(model: nn.Module) -> None:
    """Let the norms of `model`, the same objects, compute by torch's operator if that is equal."""
    for each in model.modules():
        kind = type(each)
        if kind.__name__.endswith("RMSNorm"):
            flags = (value for value in vars(each).values() if isinstance(value, bool))
            like = (kind, *flags, *each._parameters)  # a class may have norms without weights
            if like not in _known:
                _known[like] = _fused(each)
            each.__class__ = _known[like] or kind


def _epsilon_of(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _fused(norm: nn.Module) -> type | None:
    """Return a class for norms like `norm` whose forward is the operator; None: another result."""
    if not {*norm._parameters} <= {"weight"} or not isinstance(_epsilon_of(norm), float):
        return None
    kind = type(norm)
    with torch.device("cpu"), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        weight, x = (torch.randn(*n, _WIDTH, generator=generator) for n in ((), (2, 3)))
        tried = copy.copy(norm)
        tried.__dict__["_parameters"] = {name: nn.Parameter(weight) for name in norm._parameters}
        try:
            expected = tried(x)
        except Exception:  # it needs more than hidden states
            return None
        for base in (_Norm, _NormPlusOne)[: 1 + len(norm._parameters)]:
            made = type(kind.__name__, (base, kind), {"__module__": kind.__module__})
            tried.__class__ = made
            if isinstance(expected, Tensor) and torch.allclose(tried(x), expected, atol=1e-6):
                return made
    return None
