"""A thread that updates tensors in host memory, and copies between host and device.

Note: why the thread allocates the memory that it works on. Pages belong to the NUMA node of the
thread that first writes to them. Memory must be pinned before training, because `cudaHostAlloc`
waits for the device: within a backward, it could wait for a collective that waits for this rank.
"""

import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from fsdpctl.errors import EngineError, FsdpctlError
from fsdpctl.io.resources import allowed_cpus, core_of, has_cpu_affinity, num_cores

T = TypeVar("T")
CudaEvent: TypeAlias = torch.cuda.Event | None  # None (on a CPU): has passed already
_Tasks: TypeAlias = "queue.SimpleQueue[tuple[HostTask, Callable[[], None]] | None]"
_JOIN_SECONDS = 60.0  # at exit, the longest wait for the task in progress


def wait_event(event: CudaEvent) -> None:
    """Let the current stream wait for an event of another stream."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


class HostTask:
    """A task of the host's thread. Tasks run in the order of their submission."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._ready: CudaEvent = None
        self._error: BaseException | None = None

    def end(self, ready: CudaEvent = None, error: BaseException | None = None) -> None:
        """Complete the task. If its results are copied to the device, `ready` is that event."""
        self._ready, self._error = ready, error
        self._done.set()

    def wait(self) -> None:
        """Wait until the current stream can use the results; EngineError if the task failed."""
        self._done.wait()
        if isinstance(self._error, FsdpctlError):
            raise self._error
        if self._error is not None:
            raise EngineError(f"host thread: {self._error!r}") from self._error
        wait_event(self._ready)


class Copier:
    """A copier between host and device, with one stream per direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_cuda = device.type == "cuda"
        self._to_host_stream = torch.cuda.Stream(device) if on_cuda else None
        self._to_device_stream = torch.cuda.Stream(device) if on_cuda else None

    def record_event(self) -> CudaEvent:
        return None if self._to_host_stream is None else torch.cuda.current_stream().record_event()

    def copy_to_host(self, target: Tensor, source: Tensor, after: CudaEvent = None) -> CudaEvent:
        """Start a copy after `after` (None: all earlier work). Keep `source` until its event."""
        return self._copy(target, source, self._to_host_stream, after or self.record_event())

    def copy_to_device(self, target: Tensor, source: Tensor, after: CudaEvent = None) -> CudaEvent:
        """Start a copy to the device, as `copy_to_host`."""
        return self._copy(target, source, self._to_device_stream, after or self.record_event())

    def _copy(
        self, target: Tensor, source: Tensor, stream: torch.cuda.Stream | None, after: CudaEvent
    ) -> CudaEvent:
        if stream is None:
            target.copy_(source)
            return None
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()  # type: ignore[no-any-return]  # untyped in torch

    def synchronize_to_device(self) -> None:
        """Wait on the host for the end of all copies to the device."""
        if self._to_device_stream is not None:
            self._to_device_stream.synchronize()


class HostWorker:
    """A thread for work on host memory; starts at the first call, ends with this object."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._queue: _Tasks = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> HostTask:
        if self._thread is None:
            args = self._queue, self.device
            self._thread = threading.Thread(target=_work, args=args, name="host", daemon=True)
            self._thread.start()
            weakref.finalize(self, _end, self._queue, self._thread)
        task = HostTask()
        self._queue.put((task, work))
        return task

    def call(self, function: Callable[[], T]) -> T:
        results: list[T] = []
        self.submit(lambda: results.append(function())).wait()
        return results[0]

    def allocate(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Return host memory, `pinned` if the device copies from or to it."""
        on_cuda = self.device.type == "cuda"
        return self.call(lambda: torch.empty(numel, dtype=dtype, pin_memory=pinned and on_cuda))


def _work(tasks: _Tasks, device: torch.device) -> None:
    on_device: AbstractContextManager[object] = nullcontext()
    if device.type == "cuda":
        on_device = torch.cuda.device(device)
        os.sched_setaffinity(0, host_cpus(_numa_node(device)))  # this thread and its children
        torch.set_num_threads(num_cores())  # OpenMP counts per calling thread
    with on_device, torch.no_grad():
        while (item := tasks.get()) is not None:
            task, work = item
            error: BaseException | None = None
            try:
                work()
            except BaseException as caught:  # Python unbinds this name after the block
                error = caught
            del item, work  # frees their tensors before the main thread continues
            task.end(error=error)


def _end(tasks: _Tasks, thread: threading.Thread) -> None:
    tasks.put(None)
    if threading.current_thread() is not thread:
        thread.join(_JOIN_SECONDS)


def host_cpus(node: str | None) -> set[int]:
    """Return the CPUs of this rank: an equal share of the CPUs that the process may use.

    CPUs of the NUMA node with the directory `node` are preferred; None: no preference.
    """
    preferred = allowed = allowed_cpus()
    if node is not None:
        preferred = _parse_cpu_list((Path(node) / "cpulist").read_text()) & allowed or allowed
    if has_cpu_affinity():  # the user or the launcher has selected the CPUs
        return preferred
    count = max(1, len(allowed) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    ordered = sorted(preferred, key=lambda cpu: (core_of(cpu), cpu))
    # Local ranks at this NUMA node may not begin at 0, so the position wraps around.
    start = int(os.environ.get("LOCAL_RANK", 0)) * count % len(ordered)
    return set((ordered + ordered)[start : start + min(count, len(ordered))])


def _parse_cpu_list(text: str) -> set[int]:
    ranges = [each.partition("-") for each in text.strip().split(",") if each]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def _numa_node(device: torch.device) -> str | None:
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        domain, bus = properties.pci_domain_id, properties.pci_bus_id
        address = f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"
        number = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    node = Path(f"/sys/devices/system/node/node{number}")
    return str(node) if number >= 0 and (node / "cpulist").exists() else None


def pinned_allocations(count: int, nbytes: int) -> Iterator[int]:
    """Yield how many of `count` buffers of pinned memory, `nbytes` each, to allocate together.

    Torch rounds an allocation up to a power of two: each one wastes the smallest possible share.
    """

    def filled(num_buffers: int) -> float:
        return num_buffers * nbytes / (1 << (num_buffers * nbytes - 1).bit_length())

    while count and nbytes:
        together = max(range(1, count + 1), key=lambda number: (filled(number), number))
        yield together
        count -= together
