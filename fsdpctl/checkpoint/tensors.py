"""Between torch's tensors and the bytes in files."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fsdpctl.plan.layout import round_up

_ALIGNMENT = 64  # bytes
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def tensor_bytes(values: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    flat = values.detach().contiguous().view(-1)
    array: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return array.data if flat.numel() else memoryview(b"")


def tensor_of(data: memoryview, dtype: str) -> Tensor:
    """Bytes, which may be written to, as a 1-D tensor; not copied."""
    return torch.frombuffer(data, dtype=DTYPES[dtype])


class Staging:
    """Host memory that copies of a rank's tensors are put into, kept from one save to the next."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """CPU copies; they are overwritten by the next call."""
        sizes = [round_up(values.nbytes, _ALIGNMENT) for values in tensors]
        on_cuda = any(values.is_cuda for values in tensors)
        if self._memory.numel() < sum(sizes):
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=on_cuda)
        copied = []
        start = 0
        for values, size in zip(tensors, sizes, strict=True):
            memory = self._memory[start : start + size]
            start += size
            copy = memory[: values.nbytes].view(values.dtype).view(values.shape)
            copied.append(copy.copy_(values.detach(), non_blocking=True))
        if on_cuda:
            torch.cuda.synchronize()
        return copied
