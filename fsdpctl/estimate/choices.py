"""The results of operators whose sizes depend on which experts tokens choose.

Meta tensors have no values, so every expert is assumed to get the same number of tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdpctl.errors import UsageError
from fsdpctl.estimate.operators import result_of

_aten = torch.ops.aten
_UNKNOWN = (
    "the module reads the value of a tensor, which is unknown before it runs: memory that depends "
    "on it cannot be estimated"
)


class Choices:
    """The last choice of experts, and what is computed from it."""

    def __init__(self, *, is_cuda: bool) -> None:
        """Assume operators as on CUDA, or as on the CPU."""
        self._is_cuda = is_cuda
        self._count, self._among = 0, 1  # of the choices of all tokens; of the experts
        self._places: set[int] = set()  # storages of results of `nonzero`

    def result_of(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        if func is _aten.nonzero.default:
            return self._found_in(args[0])
        if func is _aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
            return self._read(args[0])
        result = result_of(func, args, kwargs, is_cuda=self._is_cuda)
        if func is _aten.topk.default:
            self._count, self._among = result[1].numel(), args[0].shape[-1]  # type: ignore[index]
        return result

    def place_in(self, tensor: Tensor) -> int:
        """Return the place that `nonzero` found: the first one.

        UsageError if the tensor is another number.
        """
        if tensor.untyped_storage()._cdata in self._places:
            return 0
        raise UsageError(_UNKNOWN)

    def _found_in(self, mask: Tensor) -> Tensor:
        """Return places of what a mask selects: of all choices those of an expert, else all."""
        count = mask.numel()
        if count == self._count:
            count = -(-count // self._among)
        found = torch.empty(count, mask.ndim, dtype=torch.int64, device="meta")
        self._places.add(found.untyped_storage()._cdata)
        return found

    def _read(self, tensor: Tensor) -> Tensor:
        """Return assumed numbers of tokens on the CPU, or zeros for a gradient.

        UsageError if the tensor is neither.
        """
        if tensor.is_floating_point():
            return torch.zeros_like(tensor, device="cpu")
        if tensor.shape != (self._among,):
            raise UsageError(_UNKNOWN)
        first = torch.arange(self._among, device="cpu") < self._count % self._among
        return (self._count // self._among + first).to(tensor.dtype)
