"""The inputs of recomputed blocks in host memory.

An input is copied while its block runs forward. Backward fetches it while the following block is
recomputed. Checkpointing saves an `OffloadedInput`, so that hooks on saved tensors are not needed.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Self
from weakref import ref

import torch
from torch import Tensor

from fsdpctl.engine.host_worker import Copier, CudaEvent, HostWorker, pinned_allocations, wait_event
from fsdpctl.errors import ModuleError


class InputBuffers:
    """The host memory for inputs of one forward, or of several forwards before their backwards."""

    def __init__(self, count: int, allocate: Callable[[int], Tensor]) -> None:
        """Provide buffers for `count` inputs per forward; `allocate` takes a number of bytes."""
        self._count, self._allocate = count, allocate
        self._free: list[Tensor] = []
        self.nbytes = 0  # allocated, used or not

    def take(self, number: int, nbytes: int) -> Tensor:
        """Return at least `nbytes` for the input of block `number`.

        If no free buffer is large enough, allocate buffers for all later blocks too.
        """
        for index, buffer in enumerate(self._free):
            if buffer.numel() >= nbytes:
                return self._free.pop(index)
        for count in pinned_allocations(self._count - number, nbytes):
            self._free += self._allocate(count * nbytes).split(nbytes)
            self.nbytes += count * nbytes
        return self._free.pop()

    def free(self, slot: Tensor) -> None:
        self._free.append(slot)


def host_inputs_bytes(sizes: Collection[int]) -> int:
    """Return the bytes of host memory for inputs of `sizes` bytes, in the order of forward."""
    buffers = InputBuffers(len(sizes), partial(torch.empty, device="meta"))
    for number, nbytes in enumerate(sizes):
        buffers.take(number, nbytes)
    return buffers.nbytes


class HostInputs:
    """Inputs of the first blocks. The last one stays on the device: backward needs it at once."""

    def __init__(self, num_blocks: int) -> None:
        self.last = num_blocks - 1  # the number of the block whose input stays on the device
        self.sizes: dict[int, int] = {}  # bytes of the last input of each block
        self.buffers = InputBuffers(self.last, self._allocate)
        self._worker: HostWorker | None = None
        self.copier: Copier | None = None  # None on the meta device
        self._newest: ref[OffloadedInput] | None = None

    def offload(self, number: int, tensor: Tensor) -> "OffloadedInput":
        """Start to copy the input of block `number`, which is about to run."""
        if self.copier is None and not tensor.is_meta:
            self._worker, self.copier = HostWorker(tensor.device), Copier(tensor.device)
        if number != self.last:
            self.sizes[number] = tensor.nbytes
        previous = None if self._newest is None else self._newest()
        if previous is not None and previous.number >= number:
            previous = None  # it belongs to an earlier forward
        offloaded = OffloadedInput(self, number, tensor, previous)
        self._newest = ref(offloaded)
        return offloaded

    def _allocate(self, nbytes: int) -> Tensor:
        assert self._worker is not None
        return self._worker.allocate(nbytes, torch.uint8, pinned=True)


class OffloadedInput:
    """The input of one forward of a block: a context for that forward and its recomputations."""

    def __init__(
        self, inputs: HostInputs, number: int, value: Tensor, previous: Self | None
    ) -> None:
        """Start the copy, unless the input stays on the device. Backward needs `previous` next."""
        stays_on_device = number == inputs.last
        self.number = number
        self.tensor: Tensor | None = value  # for the block
        self._inputs = inputs
        self._previous = None if previous is None else ref(previous)
        self._version: int | None = value._version  # before the forward; None after it
        self._shape, self._dtype, self._device = value.shape, value.dtype, value.device
        self._requires_grad = value.requires_grad
        self._buffer: Tensor | None = None
        self._copy_end: CudaEvent = None
        self._fetch_state: tuple[Tensor, CudaEvent] | None = None
        self._on_device = value if stays_on_device else None
        self._copier = inputs.copier
        if self._copier is not None and not stays_on_device:
            self._buffer = inputs.buffers.take(number, value.nbytes)
            self._copy_end = self._copier.copy_to_host(self._on_host(self._buffer), value.detach())

    def __enter__(self) -> Self:
        """Provide the tensor on the device; in backward, start to fetch the next input."""
        if self.tensor is None:
            self.tensor = self._take() if self._on_device is None else self._on_device
            if self._previous is not None and (before := self._previous()) is not None:
                before.fetch()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Drop the tensor once its copy is enqueued; ModuleError if the forward wrote to it.

        The stream first waits for the copy, or the allocator could reuse memory that it reads.
        """
        value, self.tensor = self.tensor, None
        version, self._version = self._version, None
        wait_event(self._copy_end)
        if kind is None and value is not None and version not in (None, value._version):
            problem = "not supported, because a block writes to its own input; set it to false"
            raise ModuleError(f"activation_checkpointing.offload=true: {problem}")

    def _take(self) -> Tensor:
        self.fetch()
        assert self._fetch_state is not None
        (tensor, arrived), self._fetch_state = self._fetch_state, None
        wait_event(arrived)
        return tensor.requires_grad_(self._requires_grad)

    def fetch(self) -> None:
        """Start to copy the input to the device, unless a copy is in flight."""
        if self._fetch_state is not None:
            return
        target = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        arrived = None
        if self._copier is not None and self._buffer is not None:
            arrived = self._copier.copy_to_device(target, self._on_host(self._buffer))
        self._fetch_state = target, arrived

    def _on_host(self, buffer: Tensor) -> Tensor:
        nbytes = self._shape.numel() * self._dtype.itemsize
        return buffer[:nbytes].view(self._dtype).view(self._shape)

    def __del__(self) -> None:
        """Free the pinned buffer when the graph is freed, also after a failure.

        After a failure, a fetch may be in flight. The stream waits for its end, or a later copy
        could overwrite the buffer, and the allocator reuse the target.
        """
        if self._fetch_state is not None:
            wait_event(self._fetch_state[1])
        if self._buffer is not None:
            self._inputs.buffers.free(self._buffer)
