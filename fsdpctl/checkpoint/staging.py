"""Host memory for snapshots, and conversion between torch tensors and bytes."""

import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fsdpctl.checkpoint.tensor_file import TENSOR_DTYPES
from fsdpctl.plan.layout import round_up

_ALIGNMENT, _ALLOCATION_BYTES = 64, 1 << 30
TORCH_DTYPES: dict[str, torch.dtype] = {
    x: getattr(torch, name) for x, (name, _) in TENSOR_DTYPES.items()
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def tensor_bytes(values: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor, without copying if it is contiguous."""
    flat = values.detach().contiguous().view(-1)
    array: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return array.data if flat.numel() else memoryview(b"")


def tensor_from_bytes(data: memoryview, dtype: str) -> Tensor:
    """Return writable bytes as a 1-D tensor without copying."""
    return torch.frombuffer(data, dtype=TORCH_DTYPES[dtype])


class StagingMemory:
    """Host memory for copies of a rank's tensors, reused by every save.

    It is allocated in chunks, because torch rounds the size of a pinned allocation up to a power of
    two and does not return pinned memory to the system.
    """

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._preparing: threading.Thread | None = None

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Pin memory for copies of tensors on a GPU, in a thread: a second per few gigabytes."""
        device = next((values.device for values in tensors if values.is_cuda), None)
        if device is None:
            return
        sizes = _sizes(tensors)

        def pin() -> None:
            with torch.cuda.device(device):  # threads start on device 0
                self._allocate(sizes, pinned=True)

        self._preparing = threading.Thread(target=pin, name="pin memory", daemon=True)
        self._preparing.start()

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy `tensors` to the CPU; the next call overwrites the copies."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        on_cuda = any(values.is_cuda for values in tensors)
        buffers, copies = self._allocate(_sizes(tensors), pinned=on_cuda), []
        for values, memory in zip(tensors, buffers, strict=True):
            target = memory[: values.nbytes].view(values.dtype).view(values.shape)
            # On the current stream, after the optimizer's kernels, which wrote `values`.
            copies.append(target.copy_(values.detach(), non_blocking=True))
        if on_cuda:
            torch.cuda.synchronize()  # the host must not read pinned memory before
        return copies

    def _allocate(self, sizes: Sequence[int], *, pinned: bool) -> list[Tensor]:
        chunk_bytes = min(sum(sizes), _ALLOCATION_BYTES)
        chunk_sizes: list[int] = []
        starts: list[tuple[int, int]] = []  # index of the chunk, offset in it
        room = -1  # the first size opens a chunk
        for size in sizes:
            if size > room:
                room = max(size, chunk_bytes)
                chunk_sizes.append(room)
            starts.append((len(chunk_sizes) - 1, chunk_sizes[-1] - room))
            room -= size
        if [each.numel() for each in self._chunks] != chunk_sizes:
            self._chunks = []  # so that torch reuses the old chunks for the new ones
            self._chunks = [
                torch.empty(n, dtype=torch.uint8, pin_memory=pinned) for n in chunk_sizes
            ]
        slices = zip(starts, sizes, strict=True)
        return [self._chunks[chunk][start : start + size] for (chunk, start), size in slices]


def _sizes(tensors: Sequence[Tensor]) -> list[int]:
    return [round_up(values.nbytes, _ALIGNMENT) for values in tensors]
