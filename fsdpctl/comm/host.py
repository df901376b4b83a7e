"""Host memory: a thread that updates tensors there, copies, and inputs of recomputed blocks.

Note: why the thread allocates what it works on. Pages belong to the NUMA node of the thread that
first writes to them, and memory must be pinned before training: `cudaHostAlloc` waits for the
device, so within a backward it can wait for a collective that waits for this rank.

An input is copied while its block runs forward. Backward fetches it while the block after it is
recomputed. Checkpointing saves a `SentInput` instead of the tensor, so that no hooks on saved
tensors are needed.
"""

import os
import queue
import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar
from weakref import ref

import torch
from torch import Tensor

from fsdpctl.errors import EngineError, FsdpctlError, ModuleError
from fsdpctl.io.resources import allowed_cpus, core_of, is_bound, num_cores
from fsdpctl.plan.step import pinned_groups

T = TypeVar("T")
Moment: TypeAlias = torch.cuda.Event | None  # of a stream; None: of a CPU, which has passed it
_Jobs: TypeAlias = "queue.SimpleQueue[tuple[Job, Callable[[], None]] | None]"
_JOIN_SECONDS = 60.0  # for which the end of the process waits for a job in progress


def wait_for(moment: Moment) -> None:
    """Let the current stream wait for a moment of another one."""
    if moment is not None:
        torch.cuda.current_stream().wait_event(moment)


class Job:
    """Work of the thread, in the order of submission."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._ready: Moment = None
        self._error: BaseException | None = None

    def end(self, ready: Moment = None, error: BaseException | None = None) -> None:
        """Complete the job; its results are on the device after `ready`."""
        self._ready, self._error = ready, error
        self._done.set()

    def wait(self) -> None:
        """Wait until the current stream can use the results; EngineError if the job failed."""
        self._done.wait()
        if self._error is not None:
            if isinstance(self._error, FsdpctlError):
                raise self._error
            raise EngineError(f"optimizer step on the host: {self._error!r}") from self._error
        wait_for(self._ready)


class Copier:
    """Copies between host and device, on a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_cuda = device.type == "cuda"
        self._down = torch.cuda.Stream(device) if on_cuda else None
        self._up = torch.cuda.Stream(device) if on_cuda else None

    def mark(self) -> Moment:
        return None if self._down is None else torch.cuda.current_stream().record_event()

    def down(self, target: Tensor, source: Tensor, after: Moment = None) -> Moment:
        """Start a copy to the host, after a moment or all earlier work; return its end."""
        return self.copy(target, source, self._down, after or self.mark())

    def up(self, target: Tensor, source: Tensor, after: Moment = None) -> Moment:
        """Start a copy to the device, after a moment or all earlier work; return its end."""
        return self.copy(target, source, self._up, after or self.mark())

    def copy(
        self, target: Tensor, source: Tensor, stream: torch.cuda.Stream | None, after: Moment
    ) -> Moment:
        if stream is None:
            target.copy_(source)
            return None
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()  # type: ignore[no-any-return]  # torch's

    def settle(self) -> None:
        """Have the host wait for all copies to the device."""
        if self._up is not None:
            self._up.synchronize()


class HostWorker:
    """The thread of a rank. It starts with the first call, and ends with the process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._queue: _Jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> Job:
        if self._thread is None:
            name, args = "optimizer on the host", (self._queue, self.device)
            self._thread = threading.Thread(target=_work, args=args, name=name, daemon=True)
            self._thread.start()
            weakref.finalize(self, _end, self._queue, self._thread)
        job = Job()
        self._queue.put((job, work))
        return job

    def call(self, function: Callable[[], T]) -> T:
        results: list[T] = []
        self.submit(lambda: results.append(function())).wait()
        return results[0]

    def allocate(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Return memory of the host; pinned if the device is to copy from or to it."""
        on_cuda = self.device.type == "cuda"
        return self.call(lambda: torch.empty(numel, dtype=dtype, pin_memory=pinned and on_cuda))


def _work(jobs: _Jobs, device: torch.device) -> None:
    on_device: AbstractContextManager[object] = nullcontext()
    if device.type == "cuda":
        on_device = torch.cuda.device(device)
        cpus = host_cpus(_numa_node(device))
        os.sched_setaffinity(0, cpus)  # of this thread, and of those that it starts
        torch.set_num_threads(num_cores())
    with on_device, torch.no_grad():
        while (next_one := jobs.get()) is not None:
            job, work = next_one
            error: BaseException | None = None
            try:
                work()
            except BaseException as caught:
                error = caught
            del next_one, work  # and what the work refers to, before the main thread continues
            job.end(error=error)


def _end(jobs: _Jobs, thread: threading.Thread) -> None:
    jobs.put(None)
    if threading.current_thread() is not thread:
        thread.join(_JOIN_SECONDS)


def host_cpus(node: str | None) -> set[int]:
    """Return this rank's hardware threads: an equal share of those that its process may use.

    `node` is the directory of a NUMA node, whose cores are preferred; None: all nodes are alike.
    """
    allowed = allowed_cpus()
    near = allowed
    if node is not None:
        near = _listed((Path(node) / "cpulist").read_text()) & allowed or allowed
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    rank = int(os.environ.get("LOCAL_RANK", 0))
    if is_bound():
        return near
    count = max(1, len(allowed) // ranks)
    ordered = sorted(near, key=lambda cpu: (core_of(cpu), cpu))
    start = rank * count % len(ordered)
    return set((ordered + ordered)[start : start + min(count, len(ordered))])


def _listed(text: str) -> set[int]:
    ends = [[int(end) for end in each.split("-")] for each in text.strip().split(",") if each]
    return {number for first, *last in ends for number in range(first, (last or [first])[0] + 1)}


def _numa_node(device: torch.device) -> str | None:
    about: Any = torch.cuda.get_device_properties(device)
    try:
        place = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
        number = int(Path(f"/sys/bus/pci/devices/{place}/numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    node = Path(f"/sys/devices/system/node/node{number}")
    return str(node) if number >= 0 and (node / "cpulist").exists() else None


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
