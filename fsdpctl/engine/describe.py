"""A module as the plan sees it, and its parameters by name."""

from collections.abc import Iterator

import torch
from torch import nn

from fsdpctl.plan.layout import ParamSpec
from fsdpctl.plan.units import ModuleSpec


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without the `torch.`."""
    return str(dtype).removeprefix("torch.")


def describe_module(module: nn.Module) -> ModuleSpec:
    """The tree of modules and parameters; a shared parameter has its first name everywhere."""
    names = {id(param): name for name, param in module.named_parameters()}

    def describe(name: str, each: nn.Module) -> ModuleSpec:
        own = tuple(
            ParamSpec(
                names[id(param)],
                tuple(param.shape),
                dtype_name(param.dtype),
                param.requires_grad,
            )
            for key, param in each._parameters.items()
            if param is not None
        )
        children = tuple(
            describe(f"{name}.{key}" if name else key, child)
            for key, child in each.named_children()
        )
        is_list = isinstance(each, nn.ModuleList | nn.Sequential)
        is_called = not isinstance(each, nn.ModuleList | nn.ModuleDict)
        return ModuleSpec(
            name,
            type(each).__name__,
            is_list,
            is_called,
            own,
            children,
            _is_lookup(each),
        )

    return describe("", module)


def _is_lookup(module: nn.Module) -> bool:
    """Whether it is an embedding and nothing more, such as a norm of its own."""
    is_plain = type(module).forward is nn.Embedding.forward and len(module._parameters) == 1
    return isinstance(module, nn.Embedding) and is_plain and not module._modules


def name_of_submodule(module: nn.Module, getter: str) -> str | None:
    """The name of what `module.getter()` returns, in the convention of transformers."""
    method = getattr(module, getter, None)
    try:
        found = method() if callable(method) else None
    except NotImplementedError:  # of transformers' models that have none
        return None
    if not isinstance(found, nn.Module):
        return None
    return next((name for name, each in module.named_modules() if each is found), None)


def all_named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Every place that holds a parameter: its name, the module, the attribute, the parameter."""
    for prefix, each in module.named_modules(remove_duplicate=False):
        for key, param in each._parameters.items():
            if param is not None:
                yield (f"{prefix}.{key}" if prefix else key), each, key, param


def replace_meta_parameters(module: nn.Module, device: torch.device) -> None:
    """Give parameters that have no memory an object that can have some; ties stay ties."""
    made: dict[int, nn.Parameter] = {}
    for _, owner, key, param in list(all_named_parameters(module)):
        if param.is_meta:
            if id(param) not in made:
                empty = torch.empty(0, dtype=param.dtype, device=device)
                made[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
            owner._parameters[key] = made[id(param)]
