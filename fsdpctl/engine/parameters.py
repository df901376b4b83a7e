"""The parameters of a sharded module, as its user meets them."""

import functools
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from fsdpctl.engine.backward import in_backward
from fsdpctl.errors import EngineError

_GRAD: Any = Tensor.grad  # the descriptor
arrived_gradient: Callable[[Tensor], Tensor | None] = _GRAD.__get__
"""What autograd has left at a parameter; `param.grad` is what its user may read."""


class _Sharded:
    """What a sharded parameter answers instead of being read or copied in silence."""

    _has_gradient_elsewhere: Callable[[], bool]
    _is_lent = False  # within full_parameters

    def _grad(self: Any) -> Tensor | None:
        gradient = arrived_gradient(self)
        if gradient is not None or in_backward() or _is_compiling():
            return gradient
        if self._has_gradient_elsewhere():
            raise EngineError(
                "a sharded model's gradients are not in its parameters' grad: "
                "fsdpctl.clip_grad_norm_(model, …) clips them by the norm over all ranks"
            )
        return None

    grad = property(_grad, _GRAD.__set__, _GRAD.__delete__)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> nn.Parameter:
        if not self._is_lent:
            raise refuse_call("a copy of the module, but within model.full_parameters(),")
        copied: nn.Parameter = deepcopy(self._alone("a copy of"))
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return self._alone("pickling").__reduce_ex__(protocol)

    def _alone(self: Any, what: str) -> Any:
        """Of its plain kind, with the same values."""
        if is_at_rest(self):
            raise refuse_call(f"{what} the module, whose parameters are not here between steps,")
        return self.data.as_subclass(_plain(type(self))).requires_grad_(self.requires_grad)


def _is_compiling() -> bool:
    """Whether torch.compile looks at tensors, as it does at all that they have."""
    return torch._guards.CompileContext.try_get() is not None


@functools.cache
def _sharded(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    return type(kind.__name__, (_Sharded, kind), {"__module__": kind.__module__})


def _plain(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    plain: type[nn.Parameter] = kind.__bases__[1]
    return plain


def mark_sharded(param: nn.Parameter, has_gradient: Callable[[], bool]) -> None:
    """Have the parameter, the same object, answer mistakes.

    `has_gradient` says whether its gradient lies somewhere else than in its `grad`.
    """
    param.__class__ = _sharded(type(param))
    param._has_gradient_elsewhere = has_gradient  # type: ignore[attr-defined]


def lend(param: nn.Parameter, *, is_lent: bool) -> None:
    """Let the parameter be copied, or not any more."""
    param._is_lent = is_lent  # type: ignore[attr-defined]


def unmark_sharded(param: nn.Parameter) -> None:
    """The parameter is what it was before `mark_sharded`."""
    param.__class__ = _plain(type(param))
    for name in ("_has_gradient_elsewhere", "_is_lent"):
        vars(param).pop(name, None)


def is_marked(param: Tensor) -> bool:
    """Whether the parameter is one of a sharded model."""
    return isinstance(param, _Sharded)


def refuse_call(what: str) -> EngineError:
    """The error for a call that a sharded model cannot serve."""
    return EngineError(f"{what} is not possible after sharding: do it before shard_model")


def is_at_rest(param: Tensor) -> bool:
    """Whether it reads NaN: one number that stands for all elements."""
    return param.untyped_storage().nbytes() < param.nbytes
