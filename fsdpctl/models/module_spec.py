"""The specification of a module that the plan needs: its tree, parameters and their roles."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from fsdpctl.models.linear_layers import weight_layout
from fsdpctl.plan.layout import ParamSpec, Role
from fsdpctl.plan.units import ModuleSpec, UnitSpec, divide_into_units

_TRANSFORMERS = "transformers."
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
_NORM_CLASSES = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
_NORM_NAME = re.compile(r"Norm(Gated|\dd)?$")
_VECTOR_KEY = re.compile(r"bias|scale|gamma|A_log")
# Stacked matrices; `gate_proj` is in classes that do not use transformers' interface of experts.
_EXPERT_MATRICES = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
_ROUTER_KEYS = ("gate", "wg")
_VOCABULARY_GETTERS = ("get_input_embeddings", "get_output_embeddings")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)  # type: ignore[no-any-return]


def module_spec(module: nn.Module) -> ModuleSpec:
    """Return the tree of modules and parameters; a tied parameter has its first name."""
    names = {id(param): name for name, param in module.named_parameters()}
    roles = parameter_roles(module)

    def spec(param: nn.Parameter) -> ParamSpec:
        name, shape, dtype = names[id(param)], tuple(param.shape), dtype_name(param.dtype)
        return ParamSpec(name, shape, dtype, param.requires_grad, known_role=roles[name])

    def describe(name: str, submodule: nn.Module) -> ModuleSpec:
        prefix = f"{name}." if name else ""
        return ModuleSpec(
            name,
            type(submodule).__name__,
            is_list=isinstance(submodule, nn.ModuleList | nn.Sequential),
            is_called=not isinstance(submodule, nn.ModuleList | nn.ModuleDict),
            params=tuple(spec(x) for x in submodule._parameters.values() if x is not None),
            children=tuple(describe(prefix + key, x) for key, x in submodule.named_children()),
            is_lookup=_is_lookup(submodule),
        )

    return describe("", module)


def _is_lookup(module: nn.Module) -> bool:
    """Return whether a module is an embedding that only looks up rows, without a norm or scale."""
    is_plain = type(module).forward is nn.Embedding.forward and len(module._parameters) == 1
    return isinstance(module, nn.Embedding) and is_plain and not module._modules


def module_units(module: nn.Module, classes: Sequence[str] | None) -> tuple[UnitSpec, ...]:
    """Return the units of a module, root first: modules of `classes`, or blocks if None."""
    embedding, head = (_submodule_name(module, getter) for getter in _VOCABULARY_GETTERS)
    return divide_into_units(module_spec(module), classes=classes, embedding=embedding, head=head)


def block_names(module: nn.Module) -> list[str]:
    return [unit.name for unit in module_units(module, classes=None) if unit.kind == "block"]


def vocabulary_shapes(module: nn.Module) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Return the shapes of the parameters with a row for each token of the vocabulary, by name.

    The embedding is first. The second result lists all names, including those of tied parameters.
    """
    owners = filter(None, (_submodule_name(module, each) for each in _VOCABULARY_GETTERS))
    all_params = dict(module.named_parameters(remove_duplicate=False))
    names = (f"{owner}.{key}" for owner in owners for key in ("weight", "bias"))
    all_names, params = [x for x in names if x in all_params], dict(module.named_parameters())
    return {name: tuple(params[name].shape) for name in all_names if name in params}, all_names


def _submodule_name(module: nn.Module, getter: str) -> str | None:
    method = getattr(module, getter, None)
    try:
        submodule = method() if callable(method) else None
    except NotImplementedError:  # a PreTrainedModel without embeddings
        return None
    return next((name for name, each in module.named_modules() if each is submodule), None)


def all_named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield (name, owner, key in the owner, parameter), also for further names of tied ones."""
    for prefix, each in module.named_modules(remove_duplicate=False):
        for key, param in each._parameters.items():
            if param is not None:
                yield (f"{prefix}.{key}" if prefix else key), each, key, param


def replace_meta_parameters(module: nn.Module, make: Callable[[nn.Parameter], Tensor]) -> None:
    """Replace each parameter on the meta device by `make(param)`; tied parameters stay tied."""
    replaced: dict[int, nn.Parameter] = {}
    for _, owner, key, param in list(all_named_parameters(module)):
        if param.is_meta:
            if id(param) not in replaced:
                replaced[id(param)] = nn.Parameter(make(param), requires_grad=param.requires_grad)
            owner._parameters[key] = replaced[id(param)]


def parameter_roles(module: nn.Module) -> Mapping[str, Role]:
    params = all_named_parameters(module)
    return {name: _role(module, name, owner, param) for name, owner, _, param in params}


def _role(module: nn.Module, name: str, owner: nn.Module, param: nn.Parameter) -> Role:
    parent, _, key = name.rpartition(".")
    if param.ndim <= 1 or _is_vector(owner, key, param):
        return "vector"
    if isinstance(owner, (nn.Embedding, *_CONVOLUTIONS)) or param.ndim > 3:
        return "other"
    if _is_router(module, parent, owner):
        return "other"
    if not type(owner).__module__.startswith(_TRANSFORMERS) and not isinstance(owner, nn.Linear):
        return "matrix"  # in a module of the user
    is_stack = param.ndim == 3 and ("Expert" in type(owner).__name__ or key in _EXPERT_MATRICES)
    return "matrix" if is_stack or weight_layout(owner) else "other"


def _is_vector(owner: nn.Module, key: str, param: nn.Parameter) -> bool:
    """Return whether a parameter of several dimensions acts elementwise, as biases and norms do.

    Biases of stacked experts have a row for each expert.
    """
    if isinstance(owner, _NORM_CLASSES) or _NORM_NAME.search(type(owner).__name__):
        return True
    if isinstance(owner, nn.Linear | nn.Embedding):
        return key == "bias"
    if _VECTOR_KEY.search(key) or param.numel() == max(param.shape):  # one dimension is above 1
        return True
    stacks = (each for each in owner._parameters.values() if each is not None and each.ndim == 3)
    return param.ndim == 2 and any(len(each) == len(param) for each in stacks)


def _is_router(module: nn.Module, name: str, owner: nn.Module) -> bool:
    """Return whether a module is a router of experts, by its class, its name or its siblings."""
    if "Router" in type(owner).__name__ or "router" in name:
        return True
    keys = name.split(".")
    index = next((index for index, key in enumerate(keys) if key in _ROUTER_KEYS), None)
    if index is None:
        return False
    parent = module.get_submodule(".".join(keys[:index]))
    return any("expert" in sibling for sibling, _ in parent.named_parameters())
