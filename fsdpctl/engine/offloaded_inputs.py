"""The inputs of recomputed blocks in host memory.

An input is copied while its block runs forward. Backward fetches it while the next block in forward
is recomputed. Checkpointing saves an `OffloadedInput` instead of the tensor, so that no hooks on
saved tensors are needed.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Self
from weakref import ref

import torch
from torch import Tensor

from fsdpctl.engine.host_worker import (
    Copier,
    HostWorker,
    StreamEvent,
    pinned_allocations,
    wait_event,
)
from fsdpctl.errors import ModuleError


class HostBuffers:
    """The host memory for inputs of one forward, or of several forwards before their backwards."""

    def __init__(self, count: int, allocate: Callable[[int], Tensor]) -> None:
        """Provide buffers for `count` inputs per forward; `allocate` takes a number of bytes."""
        self._count, self._allocate = count, allocate
        self._free: list[Tensor] = []
        self.nbytes = 0  # allocated, used or not

    def take(self, number: int, nbytes: int) -> Tensor:
        for index, slot in enumerate(self._free):
            if slot.numel() >= nbytes:
                return self._free.pop(index)
        for count in pinned_allocations(self._count - number, nbytes):
            self._free += self._allocate(count * nbytes).split(nbytes)
            self.nbytes += count * nbytes
        return self._free.pop()

    def free(self, slot: Tensor) -> None:
        self._free.append(slot)


def host_inputs_bytes(sizes: Collection[int]) -> int:
    """Return the bytes of host memory for inputs of `sizes` bytes, in the order of forward."""
    slots = HostBuffers(len(sizes), partial(torch.empty, device="meta"))
    for number, nbytes in enumerate(sizes):
        slots.take(number, nbytes)
    return slots.nbytes


class HostInputs:
    """The offloaded inputs of blocks, without the last block: backward needs its input at once."""

    def __init__(self, num_blocks: int) -> None:
        self._last = num_blocks - 1
        self.sizes: dict[int, int] = {}  # bytes of the last input of each block
        self.buffers = HostBuffers(self._last, self._allocate)
        self._worker: HostWorker | None = None
        self.copier: Copier | None = None  # None on the meta device
        self._newest: ref[OffloadedInput] | None = None

    def offload(self, number: int, tensor: Tensor) -> "OffloadedInput":
        """Start to copy the input of block `number`, which is about to run."""
        if self.copier is None and not tensor.is_meta:
            self._worker, self.copier = HostWorker(tensor.device), Copier(tensor.device)
        stays = number == self._last
        if not stays:
            self.sizes[number] = tensor.nbytes
        newest = None if self._newest is None else self._newest()
        is_next = newest is not None and newest.number < number  # in the same forward
        offloaded = OffloadedInput(self, number, tensor, newest if is_next else None, stays=stays)
        self._newest = ref(offloaded)
        return offloaded

    def _allocate(self, nbytes: int) -> Tensor:
        assert self._worker is not None
        return self._worker.allocate(nbytes, torch.uint8, pinned=True)


class OffloadedInput:
    """The input of one forward of a block: a context for that forward and its recomputations."""

    def __init__(
        self,
        inputs: HostInputs,
        number: int,
        value: Tensor,
        previous: "OffloadedInput | None",
        *,
        stays: bool,
    ) -> None:
        """Start the copy; an input that `stays` is not copied. Backward needs `previous` next."""
        self.number = number
        self.tensor: Tensor | None = value  # for the block
        self._inputs = inputs
        self._previous = None if previous is None else ref(previous)
        self._version: int | None = value._version  # until the end of the forward
        self._meta = value.shape, value.dtype, value.device, value.requires_grad
        self._buffer: Tensor | None = None
        self._copy_end: StreamEvent = None
        self._fetch_state: tuple[Tensor, StreamEvent] | None = None
        self._stays = value if stays else None
        self._copier = inputs.copier
        if self._copier is not None and not stays:
            self._buffer = inputs.buffers.take(number, value.nbytes)
            self._copy_end = self._copier.to_host(self._on_host(self._buffer), value.detach())

    def __enter__(self) -> Self:
        """Provide the tensor on the device; in backward, start to fetch the next input."""
        if self.tensor is None:
            self.tensor = self._take() if self._stays is None else self._stays
            if self._previous is not None and (before := self._previous()) is not None:
                before.fetch()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Drop the tensor once its copy is enqueued; ModuleError if the forward wrote to it.

        The stream waits for the copy first: the allocator could reuse the memory too early.
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
        return tensor.requires_grad_(self._meta[-1])

    def fetch(self) -> None:
        """Start to copy the input to the device, unless a copy is in flight."""
        if self._fetch_state is not None:
            return
        shape, dtype, device, _ = self._meta
        target, arrived = torch.empty(shape, dtype=dtype, device=device), None
        if self._copier is not None and self._buffer is not None:
            arrived = self._copier.to_device(target, self._on_host(self._buffer))
        self._fetch_state = target, arrived

    def _on_host(self, slot: Tensor) -> Tensor:
        shape, dtype, *_ = self._meta
        return slot[: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def __del__(self) -> None:
        """Free the memory when the graph is freed, also after a failure.

        The stream waits first: the memory could be reused while the copy still reads it.
        """
        if self._fetch_state is not None:
            wait_event(self._fetch_state[1])
        if self._buffer is not None:
            self._inputs.buffers.free(self._buffer)
