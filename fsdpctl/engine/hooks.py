"""Binds module and autograd events to the runtime. Takes no decision."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fsdpctl.engine.runtime import Runtime
from fsdpctl.engine.unit import ShardedUnit, UnitBuffer


def _on_gradient(outputs: object, call: Any) -> None:
    """Have `call()` run when the gradient of any tensor in `outputs` is there."""
    if not torch.is_grad_enabled():
        return
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(lambda gradient: call())


def hook_root(module: nn.Module, runtime: Runtime, param_dtype: torch.dtype | None) -> None:
    """Events of the outermost module; floating inputs are cast to `param_dtype`."""

    def cast(value: object) -> object:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(param_dtype) if is_float else value  # type: ignore[attr-defined]  # narrowed by is_float

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        runtime.begin_forward()
        return (args, kwargs) if param_dtype is None else tree_map(cast, (args, kwargs))

    def after(module: nn.Module, args: Any, outputs: Any) -> None:
        _on_gradient(outputs, runtime.begin_backward)
        runtime.end_forward()

    module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    module.register_forward_hook(after)


def hook_unit(module: nn.Module, runtime: Runtime, unit: ShardedUnit) -> None:
    """Events of the module whose parameters form `unit`."""
    gathers_in_backward = unit.name not in runtime.order.needs_no_backward_gather

    def before(module: nn.Module, args: Any) -> None:
        runtime.begin_unit(unit)

    def after(module: nn.Module, args: Any, outputs: Any) -> None:
        if gathers_in_backward:
            _on_gradient(outputs, lambda: runtime.begin_unit_backward(unit))
        runtime.end_unit(unit)

    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(after)


def hook_gradients(runtime: Runtime, unit: ShardedUnit) -> None:
    """Events of each trainable parameter's gradient."""

    def watch(buffer: UnitBuffer, index: int) -> None:
        def arrived(param: Tensor) -> None:
            runtime.gradient_arrived(unit, buffer, index)

        buffer.params[index].register_post_accumulate_grad_hook(arrived)

    for buffer in unit.trainable_buffers:
        for index in range(len(buffer.params)):
            watch(buffer, index)
