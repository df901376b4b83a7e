"""Binds module and autograd events to the runtime, without any decisions."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fsdpctl.engine.calls import in_backward
from fsdpctl.engine.runtime import Runtime
from fsdpctl.engine.unit import ShardedUnit


def _made_from(outputs: object, inputs: "_Inputs") -> list[Tensor]:
    """Return the tensors with a graph that a forward made.

    Tensors passed through from `inputs` show nothing about this module's backward.
    """
    if not torch.is_grad_enabled():
        return []
    return [
        leaf
        for leaf in _leaves(outputs)
        if isinstance(leaf, Tensor) and leaf.requires_grad and not inputs.has_untouched(leaf)
    ]


def _leaves(value: object) -> list[object]:
    """Return the result of `tree_leaves`, which is slow for values that are not a tree."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) is tuple and all(isinstance(each, Tensor) for each in value):
        return list(value)
    leaves: list[object] = tree_leaves(value)
    return leaves


class _Inputs:
    """The inputs of a forward, by which its outputs are recognized as new."""

    def __init__(self, values: object = ()) -> None:
        leaves = _leaves(values) if torch.is_grad_enabled() else ()
        self._versions = {
            id(leaf): leaf._version
            for leaf in leaves
            if isinstance(leaf, Tensor) and not leaf.is_inference()
        }

    def has_untouched(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is an input that was not written to since."""
        return self._versions.get(id(tensor)) == tensor._version


def hook_root(module: nn.Module, runtime: Runtime, param_dtype: torch.dtype | None) -> None:
    """Hook the outermost module, and cast its floating-point inputs to `param_dtype`."""

    def cast(value: object) -> object:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(param_dtype) if is_float else value  # type: ignore[attr-defined]  # narrowed by is_float

    own = id(module)

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if id(module) != own:  # a copy, which has the hooks too
            return None
        runtime.begin_forward()
        return (args, kwargs) if param_dtype is None else tree_map(cast, (args, kwargs))

    def after(module: nn.Module, args: Any, outputs: Any) -> None:
        if id(module) != own:
            return
        forward = None if in_backward() else runtime.calls.running
        for made in _made_from(outputs, _Inputs()):
            made.register_hook(lambda gradient: runtime.begin_backward(forward))
        runtime.end_forward()

    runtime.hooks += [
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        module.register_forward_hook(after),
    ]


def hook_unit(module: nn.Module, runtime: Runtime, unit: ShardedUnit) -> None:
    """Hook the module whose parameters form `unit`."""

    given, own_id = _Inputs(), id(module)

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal given
        if id(module) != own_id:
            return
        runtime.begin_unit(unit)
        given = _Inputs((*args, *kwargs.values()))

    def after(module: nn.Module, args: Any, outputs: Any) -> None:
        nonlocal given
        if id(module) != own_id:
            return
        own, given = _made_from(outputs, given), _Inputs()
        if own:
            call = None if in_backward() else runtime.calls.open(unit.name)
            for made in own:
                witness = None if call is None else call.forward.witness(made)
                made.register_hook(
                    lambda gradient, _=witness: runtime.begin_unit_backward(unit, call)
                )
        runtime.end_unit(unit)

    runtime.hooks += [
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        module.register_forward_hook(after),
    ]


def hook_gradients(runtime: Runtime, unit: ShardedUnit) -> None:
    """Begin a backward that reaches a parameter before any module.

    A loss can depend only on parameters that stay unsharded after the forward.
    """
    backward = runtime.backward

    def arrived(param: Tensor) -> None:
        if not backward.is_live:
            runtime.begin_backward()

    for buffer in unit.trained_buffers:
        for param in buffer.params:
            runtime.hooks.append(param.register_post_accumulate_grad_hook(arrived))
