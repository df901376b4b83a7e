"""The roles of parameters in their modules: matrices, vectors that scale or shift, and others."""

import re
from collections.abc import Mapping

from torch import nn

from fsdpctl.models.products import is_transposed
from fsdpctl.plan.layout import Role

_OF_TRANSFORMERS = "transformers."
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
_NORM = re.compile(r"Norm(Gated|\dd)?$")
_ELEMENTWISE = re.compile(r"bias|scale|gamma|A_log")  # names of vectors
_EXPERTS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")


def parameter_roles(module: nn.Module) -> Mapping[str, Role]:
    roles: dict[str, Role] = {}
    for above, owner in module.named_modules():
        for key, param in owner._parameters.items():
            name = f"{above}.{key}" if above else key
            if param is not None and name not in roles:
                roles[name] = _role(module, name, owner, param)
    return roles


def _role(module: nn.Module, name: str, owner: nn.Module, param: nn.Parameter) -> Role:
    above, _, key = name.rpartition(".")
    if param.ndim <= 1 or _is_vector(owner, key, param):
        return "vector"
    if isinstance(owner, (nn.Embedding, *_CONVOLUTIONS)) or param.ndim > 3:
        return "other"
    if _is_router(module, above, owner):
        return "other"
    if not type(owner).__module__.startswith(_OF_TRANSFORMERS) and not isinstance(owner, nn.Linear):
        return "matrix"  # of the user's own module
    is_stack = param.ndim == 3 and ("Expert" in type(owner).__name__ or key in _EXPERTS)
    return "matrix" if is_stack or is_transposed(owner) is not None else "other"


def _is_vector(owner: nn.Module, key: str, param: nn.Parameter) -> bool:
    """Return whether a parameter of several dimensions is a bias, the weight of a norm, or alike.

    Biases of experts have a row for each, next to the matrices.
    """
    if isinstance(owner, _NORMS) or _NORM.search(type(owner).__name__):
        return True
    if isinstance(owner, nn.Linear | nn.Embedding):
        return key == "bias"
    if _ELEMENTWISE.search(key) or param.numel() == max(param.shape):
        return True
    stacks = (each for each in owner._parameters.values() if each is not None and each.ndim == 3)
    return param.ndim == 2 and any(len(each) == len(param) for each in stacks)


def _is_router(module: nn.Module, name: str, owner: nn.Module) -> bool:
    """Return whether a module chooses experts: by its class, its name, or its neighbors."""
    words = name.split(".")
    if "Router" in type(owner).__name__ or any("router" in word for word in words):
        return True
    if not {"gate", "wg"} & {*words}:
        return False
    place = next(place for place, word in enumerate(words) if word in ("gate", "wg"))
    above = module.get_submodule(".".join(words[:place]))
    names = [name for name, _ in above.named_parameters()]
    return any("expert" in each for each in names)
