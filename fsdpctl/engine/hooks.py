"""Binds module and autograd events to the runtime, without any decisions."""

import weakref
from collections.abc import Callable
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


def _hook(
    module: nn.Module,
    runtime: Runtime,
    before: Callable[[Any, Any], Any],
    after: Callable[[Any], None],
) -> None:
    """Register `before(args, kwargs)` and `after(outputs)` for this object.

    A copy of the module has the hooks too, and must not run them.
    """
    own = id(module)

    def before_own(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return before(args, kwargs) if id(module) == own else None

    def after_own(module: nn.Module, args: Any, outputs: Any) -> None:
        if id(module) == own:
            after(outputs)

    runtime.hooks += [
        module.register_forward_pre_hook(before_own, with_kwargs=True, prepend=True),
        module.register_forward_hook(after_own),
    ]


def hook_root(module: nn.Module, runtime: Runtime, param_dtype: torch.dtype | None) -> None:
    """Hook the outermost module, and cast its floating-point inputs to `param_dtype`."""

    def cast(value: object) -> object:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(param_dtype) if is_float else value  # type: ignore[attr-defined]  # narrowed by is_float

    def before(args: Any, kwargs: Any) -> Any:
        runtime.begin_forward()
        return (args, kwargs) if param_dtype is None else tree_map(cast, (args, kwargs))

    def after(outputs: Any) -> None:
        forward = None if in_backward() else runtime.calls.running
        for made in _made_from(outputs, _Inputs()):
            made.register_hook(lambda gradient: runtime.begin_backward(forward))
        runtime.end_forward()

    _hook(module, runtime, before, after)


def hook_unit(module: nn.Module, runtime: Runtime, unit: ShardedUnit) -> None:
    """Hook the module whose parameters form `unit`."""
    given = _Inputs()

    def before(args: Any, kwargs: Any) -> None:
        nonlocal given
        runtime.begin_unit(unit)
        given = _Inputs((*args, *kwargs.values()))

    def after(outputs: Any) -> None:
        nonlocal given
        own, given = _made_from(outputs, given), _Inputs()
        if own:
            call = None if in_backward() else runtime.calls.open(unit.name)
            for made in own:
                witness = None if call is None else call.forward.witness(made)
                made.register_hook(
                    lambda gradient, _=witness: runtime.begin_unit_backward(unit, call)
                )
        runtime.end_unit(unit)

    _hook(module, runtime, before, after)


def hook_gradients(runtime: Runtime, unit: ShardedUnit) -> None:
    """Begin a backward that reaches a parameter before any module.

    A loss can depend only on parameters that stay unsharded after the forward.
    """
    # The garbage collector does not look into hooks of tensors: one that held the runtime, which
    # has the parameters, would keep a model for ever.
    known = weakref.ref(runtime)

    def arrived(param: Tensor) -> None:
        found = known()
        if found is not None and not found.backward.is_live:
            found.begin_backward()

    for buffer in unit.trained_buffers:
        for param in buffer.params:
            runtime.hooks.append(param.register_post_accumulate_grad_hook(arrived))
