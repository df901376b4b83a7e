"""Binds module and autograd events to the runtime, and incorrect use of a module to errors."""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves, tree_map

from fsdpctl.engine.backward_tracker import in_backward
from fsdpctl.engine.blocks import FORWARDS
from fsdpctl.engine.flat_buffer import FlatBuffer
from fsdpctl.engine.parameters import (
    has_placeholder,
    impossible_after_sharding,
    is_marked,
    mark_sharded,
)
from fsdpctl.engine.runtime import Runtime
from fsdpctl.engine.unit import ShardedUnit
from fsdpctl.errors import EngineError, ModuleError


def _made_from(outputs: object, inputs: "_Inputs") -> list[Tensor]:
    """Return the tensors with a graph that a forward made.

    Tensors passed through from `inputs` show nothing about this module's backward.
    """
    if not torch.is_grad_enabled():
        return []
    tensors = (leaf for leaf in _leaves(outputs) if isinstance(leaf, Tensor))
    return [x for x in tensors if x.requires_grad and not inputs.has_untouched(x)]


def _leaves(value: object) -> list[object]:
    """Return the result of `tree_leaves`, which is slow for values that are not a tree."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) is tuple and all(isinstance(each, Tensor) for each in value):
        return list(value)
    return tree_leaves(value)


class _Inputs:
    """The inputs of a forward, by which its outputs are recognized as new."""

    def __init__(self, values: object = ()) -> None:
        leaves = _leaves(values) if torch.is_grad_enabled() else ()
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        self._versions = {id(x): x._version for x in tensors if not x.is_inference()}

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
        forward = None if in_backward() else runtime.tracker.running
        for made in _made_from(outputs, _Inputs()):
            made.register_hook(lambda gradient: runtime.begin_backward(forward))
        runtime.end_forward()

    _hook(module, runtime, before, after)


def hook_unit(module: nn.Module, runtime: Runtime, unit: ShardedUnit) -> None:
    given = _Inputs()

    def before(args: Any, kwargs: Any) -> None:
        nonlocal given
        runtime.begin_unit(unit)
        given = _Inputs((*args, *kwargs.values()))

    def after(outputs: Any) -> None:
        nonlocal given
        own, given = _made_from(outputs, given), _Inputs()
        if own:
            call = None if in_backward() else runtime.tracker.add_call(unit.name)
            for made in own:
                witness = None if call is None else call.forward.probe(made)
                made.register_hook(
                    lambda gradient, _=witness: runtime.begin_unit_backward(unit, call)
                )
        runtime.end_unit(unit)

    _hook(module, runtime, before, after)


def hook_backward_at_parameters(runtime: Runtime, unit: ShardedUnit) -> None:
    """Begin a backward that reaches a parameter before any module.

    A loss can depend only on parameters that stay unsharded after the forward.
    """
    # The garbage collector does not look into hooks of tensors: one that held the runtime, which
    # has the parameters, would keep a model for ever.
    known = weakref.ref(runtime)

    def arrived(param: Tensor) -> None:
        found = known()
        if found is not None and not found.backward.is_running:
            found.begin_backward()

    for buffer in unit.trained_buffers:
        for param in buffer.params:
            runtime.hooks.append(param.register_post_accumulate_grad_hook(arrived))


_RUNTIME_REF = "_fsdpctl_runtime"
_COMPILED = "_torchdynamo_orig_callable"  # what functions that torch.compile returns have
_OF_MATRICES, _OF_ALL = ("Adafactor", "Muon"), ("LBFGS",)  # what torch's optimizers read at once


def guard_module(module: nn.Module, runtime: Runtime) -> None:
    """Make incorrect use of the sharded module raise errors."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise impossible_after_sharding("moving or casting the model")

    module._apply = refuse  # type: ignore[method-assign]  # for this instance only
    home = weakref.ref(runtime)
    for each in module.modules():
        runtime.hooks.append(each.register_state_dict_pre_hook(_check_state))
    for buffer in runtime.buffers:
        setattr(buffer.shard.param, _RUNTIME_REF, home)
        for param in buffer.params:
            mark_sharded(param, partial(_has_gradients, weakref.ref(buffer)), buffer.placeholder)


def _has_gradients(of: weakref.ref[FlatBuffer]) -> bool:
    buffer = of()
    if buffer is None:
        return False
    return buffer.shard.has_grad or buffer.held_gradients is not None


def is_sharded(module: nn.Module) -> bool:
    return any(map(is_marked, module.parameters()))


def _check_state(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if any(map(has_placeholder, module.parameters(recurse=False))):
        way = "call model.state_dict(), or call it within model.full_parameters()"
        raise EngineError(f"the module's own state_dict() has no weights between steps; {way}")


def watch_first_forward(module: nn.Module, runtime: Runtime) -> None:
    """Let the first forward find modules that compute with parameters that are not gathered.

    Units are gathered when their modules are called: one that is called by `.forward`, or in parts,
    would compute with NaN. Later forwards make the same calls and are not watched. Modules within a
    compiled function are not watched: Dynamo would guard their hooks, compile each block apart, and
    run all of them eagerly once the hooks are gone.
    """
    handles = [
        each.register_forward_pre_hook(partial(_check_gathered, name))
        for name, each in _uncompiled("", module)
        if each._parameters
    ]

    def end(module: nn.Module, args: Any, outputs: Any) -> None:
        for handle in handles:
            handle.remove()

    handles.append(module.register_forward_hook(end))
    runtime.hooks += handles


def _uncompiled(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if module._compiled_call_impl is not None:
        return
    yield name, module  # a compiled forward does not contain the hooks of its own module
    if not any(hasattr(getattr(module, each, None), _COMPILED) for each in FORWARDS):
        for key, child in module.named_children():
            yield from _uncompiled(f"{name}.{key}" if name else key, child)


def _check_gathered(name: str, module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for key, param in module._parameters.items():
        if param is not None and has_placeholder(param):
            raise ModuleError(
                f"{name or 'the module'} computes with its {key}, which is not gathered: its unit "
                "was not called as a module but in parts, or by .forward; call it, or pass such "
                "parts as units="
            )


def _params(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if any(map(is_marked, _params(optimizer))):
        raise EngineError(
            "the optimizer has model.parameters(), which exist only while the model runs; use "
            "ShardedAdamW(model), or any elementwise optimizer with model.flat_parameters()"
        )
    name = type(optimizer).__name__
    if name not in _OF_MATRICES + _OF_ALL:
        return
    shards = any(home.strategy.shards_optimizer for home in _runtimes_of(optimizer))
    if shards or (name in _OF_MATRICES and _runtimes_of(optimizer)):
        raise EngineError(
            f"{name} needs more than one element at a time, and flat parameters are concatenated "
            "parts of tensors; use an elementwise optimizer"
        )


def _runtimes_of(optimizer: torch.optim.Optimizer) -> list[Runtime]:
    references = {getattr(param, _RUNTIME_REF, None) for param in _params(optimizer)} - {None}
    found = [home() for home in references if home is not None]
    return [runtime for runtime in found if runtime is not None]


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for runtime in _runtimes_of(optimizer):
        runtime.masters_changed(trained_only=True)


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
