"""The Parameter objects of a sharded module, and a snapshot that detects changes of the module."""

import functools
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from fsdpctl.engine.backward_tracker import in_backward
from fsdpctl.errors import EngineError, ModuleError
from fsdpctl.models.module_spec import all_named_parameters
from fsdpctl.plan.layout import ParamSpec

_GRAD: Any = Tensor.grad  # the descriptor
accumulated_grad: Callable[[Tensor], Tensor | None] = _GRAD.__get__
"""Return the gradient that autograd accumulated in a parameter, without the checks of `grad`."""


class _Sharded:
    """A mixin of sharded parameters, which raises errors if a read or copy would be wrong."""

    _has_grad_elsewhere: Callable[[], bool]
    _placeholder_storage: int  # identity of the storage of the NaN that a sharded parameter reads
    _is_exposed = False  # whether the parameter has full values, within full_parameters

    def _grad(self: Any) -> Tensor | None:
        gradient = accumulated_grad(self)
        # torch.compile reads all attributes of tensors while it traces.
        is_tracing = torch._guards.CompileContext.try_get() is not None
        if gradient is not None or in_backward() or is_tracing:
            return gradient
        if self._has_grad_elsewhere():
            raise EngineError(
                "param.grad: gradients of a sharded model are stored in its shards; to clip them, "
                "call fsdpctl.clip_grad_norm_(model, …)"
            )
        return None

    grad = property(_grad, _GRAD.__set__, _GRAD.__delete__)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> nn.Parameter:
        if not self._is_exposed:
            raise EngineError(
                "copying the module: only possible before shard_model or within "
                "model.full_parameters()"
            )
        copied: nn.Parameter = deepcopy(self._as_plain("copying"))
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return self._as_plain("pickling").__reduce_ex__(protocol)

    def _as_plain(self: Any, what: str) -> Any:
        if has_placeholder(self):
            raise impossible_after_sharding(f"{what} the module while its parameters are sharded")
        return self.data.as_subclass(_plain(type(self))).requires_grad_(self.requires_grad)


@functools.cache
def _sharded(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    return type(kind.__name__, (_Sharded, kind), {"__module__": kind.__module__})


def _plain(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    return kind.__bases__[1]  # the bases are (_Sharded, kind), see _sharded


def mark_sharded(param: nn.Parameter, has_grad: Callable[[], bool], placeholder: Tensor) -> None:
    """Change the class of `param` in place, so that incorrect use raises errors.

    `has_grad` returns whether a gradient is stored outside `param.grad`. `placeholder` is the
    element that the parameter reads while it is sharded.
    """
    param.__class__ = _sharded(type(param))
    param._placeholder_storage = _storage(placeholder)  # type: ignore[attr-defined]
    param._has_grad_elsewhere = has_grad  # type: ignore[attr-defined]


def unmark_sharded(param: nn.Parameter) -> None:
    param.__class__ = _plain(type(param))
    for name in ("_has_grad_elsewhere", "_placeholder_storage", "_is_exposed"):
        vars(param).pop(name, None)


def is_marked(param: Tensor) -> bool:
    return isinstance(param, _Sharded)


def impossible_after_sharding(what: str) -> EngineError:
    """Return the error for a call that a sharded model does not support."""
    return EngineError(f"{what} is not possible after sharding; do it before shard_model")


def has_placeholder(param: Tensor) -> bool:
    """Return whether the parameter is sharded now, so that it reads NaN."""
    return getattr(param, "_placeholder_storage", None) == _storage(param)


def _storage(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage; a fake tensor has no address."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]  # untyped in torch


class ParameterSnapshot:
    """The state of the parameters when the model was sharded, and the CUDA stream of sharding."""

    def __init__(
        self, params: Sequence[tuple[str, ParamSpec, nn.Parameter]], device: torch.device
    ) -> None:
        self._params = [(spec, param) for _, spec, param in params]
        self._trained = [(unit, param) for unit, spec, param in params if spec.trainable]
        self._locations: list[tuple[str, dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        self._modules: list[tuple[str, nn.Module]] = []
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def remember(self, module: nn.Module, *, has_gather_hooks: bool) -> None:
        """Remember where parameters are, and modules, whose gather hooks must not be compiled."""
        all_params = all_named_parameters(module)
        self._locations = [(name, x._parameters, key, param) for name, x, key, param in all_params]
        self._modules = list(module.named_modules()) if has_gather_hooks else []

    def check(self) -> None:
        """Check that parameters, their `requires_grad` and the CUDA stream have not changed.

        ModuleError names a changed parameter or module. EngineError if the stream changed: autograd
        accumulates gradients on the stream of sharding, so another stream's forward would race.
        """
        for name, params, key, param in self._locations:
            if params.get(key) is not param:
                raise ModuleError(
                    f"{name} is not the parameter that was sharded; write to it within "
                    "model.full_parameters(writeback=True), or unwrap() the model"
                )
        for name, module in self._modules:
            if module._compiled_call_impl is not None:
                raise ModuleError(
                    f"{name or 'the module'} was compiled together with the hooks that gather its "
                    "parameters; instead of module.compile() compile its forward: "
                    "module.forward = torch.compile(module.forward)"
                )
        for spec, param in self._params:
            if param.requires_grad is not spec.trainable:
                raise ModuleError(
                    f"{spec.name}: requires_grad was {spec.trainable} when the model was sharded "
                    f"and is {param.requires_grad}, which would change how it is sharded; unwrap() "
                    "the model, change requires_grad, and shard it again"
                )
        if self._stream is not None and torch.cuda.current_stream(self._device) != self._stream:
            raise EngineError(
                "the model runs on another CUDA stream than the one it was sharded on; call "
                "shard_model and train within the same torch.cuda.stream(…)"
            )

    def check_gradients(self) -> None:
        """Check that no parameter has an unreduced gradient; ModuleError if one has."""
        for unit, param in self._trained:
            if accumulated_grad(param) is not None:
                raise ModuleError(
                    f"gradients of {unit} were not reduced: its module's output reaches the loss "
                    "without a call of the module, or the loss uses its parameters before the "
                    "forward"
                )
