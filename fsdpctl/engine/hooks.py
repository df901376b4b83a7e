"""Binds module and autograd events to the runtime. Takes no decision."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fsdpctl.engine.runtime import Call, Runtime
from fsdpctl.engine.unit import ShardedUnit, UnitBuffer


def _on_gradient(outputs: object, inputs: object, call: Callable[[], None]) -> bool:
    """Have `call()` run when the gradient of any tensor in `outputs` is there.

    Tensors that are merely passed through from `inputs` say nothing about this module's backward.
    Returns whether there was any other.
    """
    if not torch.is_grad_enabled():
        return False
    given = {id(leaf) for leaf in tree_leaves(inputs)}
    own = [
        leaf
        for leaf in tree_leaves(outputs)
        if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in given
    ]
    for leaf in own:
        leaf.register_hook(lambda gradient: call())
    return bool(own)


def hook_root(module: nn.Module, runtime: Runtime, param_dtype: torch.dtype | None) -> None:
    """Events of the outermost module; floating inputs are cast to `param_dtype`."""

    def cast(value: object) -> object:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(param_dtype) if is_float else value  # type: ignore[attr-defined]  # narrowed by is_float

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        runtime.begin_forward()
        return (args, kwargs) if param_dtype is None else tree_map(cast, (args, kwargs))

    def after(module: nn.Module, args: Any, outputs: Any) -> None:
        _on_gradient(outputs, (), runtime.begin_backward)
        runtime.end_forward()

    runtime.hooks += [
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        module.register_forward_hook(after),
    ]


def hook_unit(module: nn.Module, runtime: Runtime, unit: ShardedUnit) -> None:
    """Events of the module whose parameters form `unit`."""

    def before(module: nn.Module, args: Any) -> None:
        runtime.begin_unit(unit)

    def after(module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        call = Call(unit)
        if _on_gradient(outputs, (args, kwargs), lambda: runtime.begin_unit_backward(call)):
            runtime.opened(call)
        runtime.end_unit(unit)

    runtime.hooks += [
        module.register_forward_pre_hook(before, prepend=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]


def hook_gradients(runtime: Runtime, unit: ShardedUnit) -> None:
    """Events of each trainable parameter's gradient."""

    def watch(buffer: UnitBuffer, index: int) -> None:
        def arrived(param: Tensor) -> None:
            runtime.gradient_arrived(unit, buffer, index)

        runtime.hooks.append(buffer.params[index].register_post_accumulate_grad_hook(arrived))

    for buffer in unit.trained_buffers:
        for index in range(len(buffer.params)):
            watch(buffer, index)
