"""The inputs of recomputed blocks in host memory.

An input is copied while its block runs forward. Backward fetches it while the block after it is
recomputed. Checkpointing saves a `SentInput` instead of the tensor, so that no hooks on saved
tensors are needed.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Self
from weakref import ref

import torch
from torch import Tensor

from fsdpctl.engine.host_worker import Copier, HostWorker, Moment, wait_for
from fsdpctl.errors import ModuleError
from fsdpctl.plan.step_plan import pinned_groups


class HostSlots:
    """Host memory for the inputs of one forward, and of more if several await their backward."""

    def __init__(self, count: int, allocate: Callable[[int], Tensor]) -> None:
        """`count` inputs are sent in a forward; `allocate` returns a number of bytes."""
        self._count, self._allocate = count, allocate
        self._free: list[Tensor] = []
        self.nbytes = 0  # allocated, used or not

    def take(self, number: int, nbytes: int) -> Tensor:
        for index, slot in enumerate(self._free):
            if slot.numel() >= nbytes:
                return self._free.pop(index)
        for count in pinned_groups(self._count - number, nbytes):
            self._free += self._allocate(count * nbytes).split(nbytes)
            self.nbytes += count * nbytes
        return self._free.pop()

    def give_back(self, slot: Tensor) -> None:
        self._free.append(slot)


def host_inputs_bytes(sizes: Collection[int]) -> int:
    """Return the bytes of host memory for inputs of these sizes, in the order of forward."""
    slots = HostSlots(len(sizes), partial(torch.empty, device="meta"))
    for number, nbytes in enumerate(sizes):
        slots.take(number, nbytes)
    return slots.nbytes


class HostInputs:
    """The inputs of a model's blocks, of which the last one stays: backward needs it at once."""

    def __init__(self, num_blocks: int) -> None:
        self._last = num_blocks - 1
        self.sizes: dict[int, int] = {}  # bytes of the last input, by the number of its block
        self.slots = HostSlots(self._last, self._allocate)
        self._worker: HostWorker | None = None
        self.copier: Copier | None = None  # None on the meta device
        self._newest: ref[SentInput] | None = None

    def send(self, number: int, given: Tensor) -> "SentInput":
        """Start to copy the input of the block with this number, which is about to run."""
        if self.copier is None and not given.is_meta:
            self._worker, self.copier = HostWorker(given.device), Copier(given.device)
        stays = number == self._last
        if not stays:
            self.sizes[number] = given.nbytes
        newest = None if self._newest is None else self._newest()
        follows = newest is not None and newest.number < number  # in the same forward
        sent = SentInput(self, number, given, newest if follows else None, stays=stays)
        self._newest = ref(sent)
        return sent

    def _allocate(self, nbytes: int) -> Tensor:
        assert self._worker is not None
        return self._worker.allocate(nbytes, torch.uint8, pinned=True)


class SentInput:
    """The input of one forward of a block: a context of that forward and of its recomputations."""

    def __init__(
        self,
        inputs: HostInputs,
        number: int,
        given: Tensor,
        before: "SentInput | None",
        *,
        stays: bool,
    ) -> None:
        """`before` is the input that backward needs next; one that `stays` is never copied."""
        self.number = number
        self.tensor: Tensor | None = given  # for the block
        self._inputs = inputs
        self._before = None if before is None else ref(before)
        self._version: int | None = given._version  # until the end of the forward
        self._like = given.shape, given.dtype, given.device, given.requires_grad
        self._slot: Tensor | None = None
        self._left: Moment = None
        self._ahead: tuple[Tensor, Moment] | None = None
        self._stays = given if stays else None
        self._copier = inputs.copier
        if self._copier is not None and not stays:
            self._slot = inputs.slots.take(number, given.nbytes)
            self._left = self._copier.down(self._on_host(self._slot), given.detach())

    def __enter__(self) -> Self:
        """Have the tensor on the device; in backward, start to fetch the one that is next."""
        if self.tensor is None:
            self.tensor = self._taken() if self._stays is None else self._stays
            if self._before is not None and (before := self._before()) is not None:
                before.fetch()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let go of the tensor on its way to the host; ModuleError if the forward wrote to it."""
        given, self.tensor = self.tensor, None
        version, self._version = self._version, None
        wait_for(self._left)
        if kind is None and given is not None and version not in (None, given._version):
            problem = "not supported, because a block writes to its own input; set it to false"
            raise ModuleError(f"activation_checkpointing.offload=true: {problem}")

    def _taken(self) -> Tensor:
        self.fetch()
        assert self._ahead is not None
        (tensor, arrived), self._ahead = self._ahead, None
        wait_for(arrived)
        return tensor.requires_grad_(self._like[-1])

    def fetch(self) -> None:
        """Start to copy the input to the device, unless it is on its way."""
        if self._ahead is not None:
            return
        shape, dtype, device, _ = self._like
        target, arrived = torch.empty(shape, dtype=dtype, device=device), None
        if self._copier is not None and self._slot is not None:
            arrived = self._copier.up(target, self._on_host(self._slot))
        self._ahead = target, arrived

    def _on_host(self, slot: Tensor) -> Tensor:
        shape, dtype, *_ = self._like
        return slot[: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def __del__(self) -> None:
        """Free the memory when the graph is freed, also after a failure."""
        if self._ahead is not None:
            wait_for(self._ahead[1])
        if self._slot is not None:
            self._inputs.slots.give_back(self._slot)
