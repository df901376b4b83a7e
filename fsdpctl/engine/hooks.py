"""Connects module and autograd events to the runtime, and turns incorrect use into errors."""

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


def _new_tensors(outputs: object, inputs: "_Inputs") -> list[Tensor]:
    """Return the outputs with a graph that are new, not passed through from `inputs`.

    A gradient of a passed-through tensor does not mean that this module's backward begins.
    """
    if not torch.is_grad_enabled():
        return []
    tensors = (leaf for leaf in _leaves(outputs) if isinstance(leaf, Tensor))
    return [x for x in tensors if x.requires_grad and not inputs.has_untouched(x)]


def _leaves(value: object) -> list[object]:
    """Return the leaves of a pytree; tensors and tuples of tensors skip the slow `tree_leaves`."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) is tuple and all(isinstance(each, Tensor) for each in value):
        return list(value)
    return tree_leaves(value)


class _Inputs:
    """The inputs of a forward, which distinguish new outputs from passed-through inputs."""

    def __init__(self, values: object = ()) -> None:
        leaves = _leaves(values) if torch.is_grad_enabled() else ()
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        # By id: the caller's arguments keep the tensors alive until the forward hook. Later, other
        # tensors may have these ids.
        self._versions = {id(x): x._version for x in tensors if not x.is_inference()}

    def has_untouched(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is an input that was not written to in the forward."""
        return self._versions.get(id(tensor)) == tensor._version


def _hook(
    module: nn.Module, runtime: Runtime, before: Callable[..., Any], after: Callable[..., None]
) -> None:
    """Register `before(args, kwargs)` and `after(outputs)` for this module object.

    A copy of the module also has the hooks, but they must not run for the copy.
    """
    module_id = id(module)  # a reference to the module from its own hook would be a cycle

    def before_own(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return before(args, kwargs) if id(module) == module_id else None

    def after_own(module: nn.Module, args: Any, outputs: Any) -> None:
        if id(module) == module_id:
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
        # None, also in `hook_unit`: the tracker records no calls of a recomputation in backward.
        forward = None if in_backward() else runtime.tracker.last_forward
        for output in _new_tensors(outputs, inputs=_Inputs()):  # passed-through tensors, too
            output.register_hook(lambda gradient: runtime.begin_backward(forward))
        runtime.end_forward()

    _hook(module, runtime, before, after)


def hook_unit(module: nn.Module, runtime: Runtime, unit: ShardedUnit) -> None:
    inputs = _Inputs()

    def before(args: Any, kwargs: Any) -> None:
        nonlocal inputs
        runtime.begin_unit(unit)
        inputs = _Inputs((*args, *kwargs.values()))

    def after(outputs: Any) -> None:
        nonlocal inputs
        tensors = _new_tensors(outputs, inputs)
        inputs = _Inputs()  # other tensors may have the ids from now on
        if tensors:
            call = None if in_backward() else runtime.tracker.add_call(unit.name)
            for output in tensors:
                # The probe shows whether a backward visits this output. The forward has only a weak
                # reference to the probe; the hook keeps the probe alive.
                probe = None if call is None else call.forward.probe(output)
                output.register_hook(lambda _, probe=probe: runtime.begin_unit_backward(unit, call))
        runtime.end_unit(unit)

    _hook(module, runtime, before, after)


def hook_backward_at_parameters(runtime: Runtime, unit: ShardedUnit) -> None:
    """Let a backward begin at a parameter of `unit`, if it reaches no module before.

    This happens if the loss uses parameters that stay unsharded after the forward.
    """
    # The garbage collector does not traverse tensor hooks: a strong reference to the runtime, which
    # refers to the parameters, would leak the model. Hooks of outputs are freed with the graph.
    runtime_ref = weakref.ref(runtime)

    def arrived(param: Tensor) -> None:
        runtime = runtime_ref()
        if runtime is not None and not runtime.backward.is_running:
            runtime.begin_backward()

    for buffer in unit.trained_buffers:
        for param in buffer.params:
            runtime.hooks.append(param.register_post_accumulate_grad_hook(arrived))


_RUNTIME_REF = "_fsdpctl_runtime"
_COMPILED = "_torchdynamo_orig_callable"  # an attribute of functions that torch.compile returns
_FORWARDS = ("forward", "_plain_forward")  # the attributes of a block that may be compiled
_MATRIX_OPTIMIZERS = ("Adafactor", "Muon")  # optimizers of torch that need full matrices
_ALL_PARAM_OPTIMIZERS = ("LBFGS",)  # optimizers of torch that need all elements of the model


def guard_module(module: nn.Module, runtime: Runtime) -> None:
    """Make incorrect use of the sharded module raise errors."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise impossible_after_sharding("moving or casting the model")

    module._apply = refuse  # type: ignore[method-assign]  # for this instance only
    runtime_ref = weakref.ref(runtime)
    for each in module.modules():
        runtime.hooks.append(each.register_state_dict_pre_hook(_check_state))
    for buffer in runtime.buffers:
        setattr(buffer.shard.param, _RUNTIME_REF, runtime_ref)
        for param in buffer.params:  # reading `param.grad` raises if the buffer has gradients
            mark_sharded(param, partial(_has_gradients, weakref.ref(buffer)), buffer.placeholder)


def _has_gradients(buffer_ref: weakref.ref[FlatBuffer]) -> bool:
    buffer = buffer_ref()
    return buffer is not None and (buffer.shard.has_grad or buffer.held_gradients is not None)


def is_sharded(module: nn.Module) -> bool:
    return any(map(is_marked, module.parameters()))


def _check_state(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if any(map(has_placeholder, module.parameters(recurse=False))):
        hint = "call model.state_dict(), or module.state_dict() within model.full_parameters()"
        raise EngineError(f"the module's own state_dict() has no weights between steps; {hint}")


def watch_first_forward(module: nn.Module, runtime: Runtime) -> None:
    """Check in the first forward that no module computes with parameters that are not gathered.

    A unit is gathered when its module is called. If only `.forward` or submodules of a unit are
    called, they would compute with NaN. Later forwards make the same calls and are not checked.
    Modules within a compiled function are not checked. Dynamo guards on their hooks, so it would
    compile each block separately. Once the hooks are removed, all guards would fail: many blocks
    exceed Dynamo's limit of recompilations, and would run eagerly.
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
    yield name, module  # hooks of a module run outside its compiled forward
    if not any(hasattr(getattr(module, each, None), _COMPILED) for each in _FORWARDS):
        for key, child in module.named_children():
            yield from _uncompiled(f"{name}.{key}" if name else key, child)


def _check_gathered(name: str, module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for key, param in module._parameters.items():
        if param is not None and has_placeholder(param):
            raise ModuleError(
                f"{name or 'the module'} computes with its {key}, which is not gathered: the "
                "module of its unit was not called; call that module (not .forward), or pass the "
                "classes of the called parts as units="
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
    if name not in _MATRIX_OPTIMIZERS + _ALL_PARAM_OPTIMIZERS:
        return
    runtimes = _runtimes_of(optimizer)
    # Flat parameters have no matrices. If they are sharded, each rank also lacks elements.
    is_wrong = name in _MATRIX_OPTIMIZERS or any(x.strategy.shards_optimizer for x in runtimes)
    if runtimes and is_wrong:
        raise EngineError(
            f"{name} needs more than one element at a time, and flat parameters are concatenated "
            "parts of tensors; use an elementwise optimizer"
        )


def _runtimes_of(optimizer: torch.optim.Optimizer) -> list[Runtime]:
    references = {getattr(param, _RUNTIME_REF, None) for param in _params(optimizer)} - {None}
    return [runtime for each in references if each and (runtime := each()) is not None]


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for runtime in _runtimes_of(optimizer):
        runtime.sync_params(trained_only=True)


# These hooks run for every optimizer of the process.
register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
