"""Whole parameters in and out of a sharded model, and what must not be done to it."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdpctl.engine.buffer import UnitBuffer
from fsdpctl.engine.describe import all_named_parameters
from fsdpctl.engine.parameters import (
    is_at_rest,
    is_marked,
    lend,
    mark_sharded,
    refuse_call,
    unmark_sharded,
)
from fsdpctl.engine.runtime import Runtime
from fsdpctl.engine.state import whole_values
from fsdpctl.engine.unit import State
from fsdpctl.errors import EngineError, nearest
from fsdpctl.shards import persistent_buffers

_HOME = "_fsdpctl_runtime"
_OF_MATRICES, _OF_ALL = ("Adafactor", "Muon"), ("LBFGS",)  # what torch's optimizers look at


@contextmanager
@torch.no_grad()
def full_parameters(runtime: Runtime, *, writeback: bool) -> Iterator[None]:
    """Inside, the parameters are whole and have the masters' values and dtype. Collective."""
    runtime.gatherer.rest()
    runtime.renewal.finish()
    wholes = []
    for unit in runtime.units.values():
        for buffer in unit.buffers:
            whole = whole_values(buffer.shard, buffer.shard.master, runtime.mesh).clone()
            for param, view in zip(buffer.params, buffer.param_views(whole), strict=True):
                param.data = view
                lend(param, is_lent=True)
            wholes.append((buffer, whole))
    try:
        yield
        if writeback:
            for buffer, whole in wholes:
                runtime.mesh.world.broadcast(whole)
                held = buffer.shard.held
                buffer.shard.master.copy_(whole[held.start : held.stop])
            runtime.masters_changed()
    finally:
        for unit in runtime.units.values():
            for buffer in unit.buffers:
                for param in buffer.params:
                    lend(param, is_lent=False)
                if unit.state is State.WHOLE:
                    buffer.point_to_whole()
                else:
                    buffer.point_to_rest()


@torch.no_grad()
def load_full_state(module: nn.Module, runtime: Runtime, state: Mapping[str, Any]) -> None:
    """Take every parameter and persistent buffer from `state`, whole tensors by name.

    Raises:
        EngineError: a name is missing or unknown, or a shape differs.
    """
    first_names = {id(param): name for name, param in module.named_parameters()}
    names = {name: first_names[id(p)] for name, _, _, p in all_named_parameters(module)}
    buffers = persistent_buffers(module)
    for name in state:
        if name not in names and name not in buffers:
            raise EngineError(f"load_state_dict: unknown {name}{nearest(name, names)}")
    values = {names[name]: value for name, value in state.items() if name in names}
    shards = [buffer.shard for unit in runtime.units.values() for buffer in unit.buffers]
    # All is checked before anything is written, and alike on every rank.
    wholes = {
        param.name: _whole_of(values, param.name, param.shape)
        for shard in shards
        for param in shard.layout.params
    }
    sources = {name: _whole_of(state, name, tuple(each.shape)) for name, each in buffers.items()}
    for shard in shards:
        for piece in shard.held_pieces():
            part = wholes[piece.param.name].reshape(-1)[piece.in_param.start : piece.in_param.stop]
            shard.view(shard.master, piece.in_flat).copy_(part)
    for name, target in buffers.items():
        target.copy_(sources[name])
    runtime.masters_changed()


def _whole_of(state: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in state:
        raise EngineError(f"load_state_dict: {name} is missing")
    value = state[name]
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise EngineError(f"load_state_dict: {name} is {found}, the model's is {list(shape)}")
    return value


@torch.no_grad()
def update_shards(runtime: Runtime, flat: Tensor) -> None:
    """Overwrite this rank's masters, laid end to end in the order of the units.

    Raises:
        EngineError: `flat` has another length.
    """
    masters = [buffer.shard.master for unit in runtime.units.values() for buffer in unit.buffers]
    numel = sum(master.numel() for master in masters)
    if not isinstance(flat, Tensor):
        raise EngineError(f"update_shards: takes a 1-D tensor, not a {type(flat).__name__}")
    if flat.ndim != 1 or flat.numel() != numel:
        raise EngineError(
            f"update_shards: a tensor of shape {list(flat.shape)}, where this rank's shards have "
            f"[{numel}] elements"
        )
    parts = flat.split([master.numel() for master in masters])
    for master, part in zip(masters, parts, strict=True):
        master.copy_(part)
    runtime.masters_changed()


def unwrap(module: nn.Module, runtime: Runtime) -> nn.Module:
    """The plain module with whole parameters of its own; the sharded model ends. Collective."""
    with full_parameters(runtime, writeback=False):
        values = {name: param.detach().clone() for name, param in module.named_parameters()}
    for handle in runtime.hooks:
        handle.remove()
    del module._apply
    for name, param in module.named_parameters():
        unmark_sharded(param)
        param.data = values[name]
        param.grad = None
    return module


def guard_module(module: nn.Module, runtime: Runtime) -> None:
    """Have mistakes with the sharded module answered instead of ignored."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise refuse_call("moving or casting the model")

    module._apply = refuse  # type: ignore[method-assign]  # for this instance only
    home = weakref.ref(runtime)
    for each in module.modules():
        runtime.hooks.append(each.register_state_dict_pre_hook(_refuse_state_at_rest))
    for unit in runtime.units.values():
        for buffer in unit.buffers:
            setattr(buffer.shard.param, _HOME, home)
            for param in buffer.params:
                mark_sharded(param, partial(_has_gradients, weakref.ref(buffer)))


def _has_gradients(of: weakref.ref[UnitBuffer]) -> bool:
    buffer = of()
    return buffer is not None and buffer.has_gradients


def is_sharded(module: nn.Module) -> bool:
    """Whether a parameter of the module, or of one within it, is sharded already."""
    return any(map(is_marked, module.parameters()))


def _refuse_state_at_rest(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if any(map(is_at_rest, module.parameters(recurse=False))):
        raise EngineError(
            "the module's own state_dict() has no weights between steps: model.state_dict() gives "
            "them whole, and so does the module within model.full_parameters()"
        )


def watch_first_forward(module: nn.Module, runtime: Runtime) -> None:
    """Have the first forward find modules that compute with parameters that are not there.

    Units are gathered when their modules are called: what is called by `.forward`, or in parts,
    would compute with NaN. Later forwards do the same calls and are not watched; what is compiled
    is not, since it would be compiled again.
    """
    handles = [
        each.register_forward_pre_hook(partial(_check_there, name))
        for name, each in _uncompiled("", module)
        if each._parameters
    ]

    def end(module: nn.Module, args: Any, outputs: Any) -> None:
        for handle in handles:
            handle.remove()

    handles.append(module.register_forward_hook(end))
    runtime.hooks += handles


def _uncompiled(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if module._compiled_call_impl is None:
        yield name, module
        for key, child in module.named_children():
            yield from _uncompiled(f"{name}.{key}" if name else key, child)


def _check_there(name: str, module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for key, param in module._parameters.items():
        if param is not None and is_at_rest(param):
            raise EngineError(
                f"{name or 'the module'} computes with its {key}, which is not here: the unit that "
                "it belongs to was not called as a module but in parts, or by .forward; call it, "
                "or name such parts with units="
            )


def _params(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if any(map(is_marked, _params(optimizer))):
        raise EngineError(
            "the optimizer was made of model.parameters(), which are whole only while the model "
            "runs: use ShardedAdamW(model), or any optimizer on model.flat_parameters()"
        )
    name = type(optimizer).__name__
    if name not in _OF_MATRICES + _OF_ALL:
        return
    shards = any(home.strategy.shards_optimizer for home in _homes(optimizer))
    if shards or (name in _OF_MATRICES and _homes(optimizer)):
        raise EngineError(
            f"{name} looks at more than one element at a time, and flat parameters are parts of "
            "tensors end to end: take an elementwise optimizer"
        )


def _homes(optimizer: torch.optim.Optimizer) -> list[Runtime]:
    """The runtimes of the models whose flat parameters it has."""
    references = {getattr(param, _HOME, None) for param in _params(optimizer)} - {None}
    found = [home() for home in references if home is not None]
    return [runtime for runtime in found if runtime is not None]


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for runtime in _homes(optimizer):
        runtime.masters_changed(trained_only=True)


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
