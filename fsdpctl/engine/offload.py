"""Master weights in host memory, stepped there while the next forward runs.

The device (or pinned host memory) stores this rank's shard of the parameters in the compute dtype.
A thread of the host steps unit by unit, in the order of the next forward. The thread copies the
gradient from the device, steps the masters in chunks that stay in the cache, casts each chunk at
once, and copies the result to the device.

Note: why so little is pinned. Only memory that the device copies from or to must be pinned, and
pinning takes a second per few gigabytes. Two buffers per direction suffice, of the largest shard.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fsdpctl.comm.flat_shard import HostScalars, HostUpdateFn, OffloadedGradient, gradient_norms
from fsdpctl.engine.flat_buffer import FlatBuffer
from fsdpctl.engine.host_worker import Copier, CudaEvent, HostTask, HostWorker, T, wait_event
from fsdpctl.engine.unit import ShardedUnit
from fsdpctl.models.module_spec import torch_dtype
from fsdpctl.plan.layout import Span
from fsdpctl.plan.step_plan import HOST_BUFFERS, HostMemory


class PinnedRing:
    """A ring of pinned buffers."""

    def __init__(self, worker: HostWorker, nbytes: int) -> None:
        self._buffers: list[Tensor] = []
        if nbytes:
            slab = worker.allocate(HOST_BUFFERS * nbytes, torch.uint8, pinned=True)
            self._buffers = list(slab.split(nbytes))
        self.in_use_until: list[CudaEvent] = [None] * HOST_BUFFERS  # ends of copies to the device
        self._next = 0

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._buffers)

    def take(self, numel: int, dtype: torch.dtype) -> tuple[int, Tensor]:
        """Return the index of the next buffer and a view of it, once the device has read it."""
        index = self._next
        self._next = (index + 1) % HOST_BUFFERS
        event, self.in_use_until[index] = self.in_use_until[index], None
        if event is not None:
            event.synchronize()
        return index, self._buffers[index][: numel * dtype.itemsize].view(dtype)


class GradientOffload:
    """The copies of reduced gradients to the host during backward, one unit at a time."""

    def __init__(self, copier: Copier, get_memory: Callable[[FlatBuffer], Tensor]) -> None:
        """Copy to `get_memory(buffer)`, the host memory for the gradient of a flat buffer."""
        self._copier, self._get_memory = copier, get_memory
        self._unit: ShardedUnit | None = None

    @torch.no_grad()
    def start(self, unit: ShardedUnit) -> None:
        """Start to copy a unit's gradients to the host.

        Gradients that are on the host already are added first, on the device.
        """
        self._unit = unit
        for buffer in unit.trained_buffers:
            shard = buffer.shard
            gradient = shard.grad
            if gradient is None:
                continue
            if shard.offloaded_grad is not None:
                previous = torch.empty_like(gradient)
                wait_event(shard.offloaded_grad.arrived)
                wait_event(self._copier.copy_to_device(previous, shard.offloaded_grad.values))
                gradient.add_(previous)
            (norm,) = gradient_norms([gradient])
            target = self._get_memory(buffer)
            arrived = self._copier.copy_to_host(target, gradient)  # `finish` frees the gradient
            shard.offloaded_grad = OffloadedGradient(target, norm, arrived)

    def finish(self) -> ShardedUnit | None:
        """Free the device's gradients of the unit of the last `start`, and return the unit.

        The stream first waits for the copies, or the allocator could reuse memory that they read.
        """
        unit, self._unit = self._unit, None
        for buffer in () if unit is None else unit.trained_buffers:
            if buffer.shard.offloaded_grad is not None:
                wait_event(buffer.shard.offloaded_grad.arrived)
            buffer.shard.grad = None
        return unit


@dataclass(slots=True)
class _Step:
    """A flat buffer to step."""

    buffer: FlatBuffer
    on_device: list[Tensor]  # the gradient, if any; ParamSync clears the list after the step
    offloaded: OffloadedGradient | None  # the gradient in host memory
    task: HostTask | None = None  # the task of the unit, if this is its last buffer

    def target(self) -> Tensor:
        """Return the stored parameters that the step replaces."""
        assert self.buffer.stored is not None
        return self.buffer.stored.view(self.buffer.shard.span)


class UnitStep(NamedTuple):
    """The step of a unit on the host. Copies read the gradients until the task is done."""

    task: HostTask
    gradients: list[list[Tensor]]  # on the device, a list of at most one per flat buffer


class HostStates:
    """This rank's master weights and gradients in host memory."""

    def __init__(self, worker: HostWorker, memory: HostMemory) -> None:
        self._worker = worker
        # Starts to step all master weights. Set by the runtime, which orders the units.
        self.start: Callable[[HostUpdateFn, HostScalars], None]
        self._copier = Copier(worker.device)
        self._slabs: dict[torch.dtype, Tensor] = {}
        for name, numel in memory.masters.items():
            dtype, pinned = torch_dtype(name), name in memory.pinned
            self._slabs[dtype] = worker.allocate(numel, dtype, pinned=pinned)
        self._num_taken = dict.fromkeys(self._slabs, 0)
        self._remainder_nbytes = 0
        self._gradient_slabs: dict[torch.dtype, Tensor] = {}  # keys: dtypes of masters
        for name, grad_dtype in memory.gradients.items():
            slab = worker.allocate(memory.masters[name], torch_dtype(grad_dtype), pinned=True)
            self._gradient_slabs[torch_dtype(name)] = slab
        self._gradient_ring = PinnedRing(worker, memory.gradient_buffers)
        self._cast_ring = PinnedRing(worker, memory.cast_buffers)
        self._scalars = worker.allocate(len(HostScalars._fields), torch.float32, pinned=True)
        self._tasks: list[HostTask] = []

    @property
    def nbytes(self) -> int:
        """The bytes of master weights, gradients and buffers, without the optimizer's moments."""
        tensors = [*self._slabs.values(), *self._gradient_slabs.values(), self._scalars]
        rings = self._gradient_ring.nbytes + self._cast_ring.nbytes
        return sum(each.nbytes for each in tensors) + self._remainder_nbytes + rings

    def take_master(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory for the next buffer's master weights."""
        start = self._num_taken[dtype]
        self._num_taken[dtype] = start + numel
        return self._slabs[dtype][start : start + numel]

    def take_remainder(self, numel: int) -> Tensor:
        """Return zeroed memory for the remainders of a buffer's master weights."""
        self._remainder_nbytes += numel
        return self.call(lambda: torch.zeros(numel, dtype=torch.int8))

    def call(self, function: Callable[[], T]) -> T:
        return self._worker.call(function)

    def gradient_offload(self) -> GradientOffload | None:
        slabs = self._gradient_slabs
        return GradientOffload(self._copier, self._gradient_memory) if slabs else None

    def _gradient_memory(self, buffer: FlatBuffer) -> Tensor:
        master = buffer.shard.param
        start = master.storage_offset()  # gradients have the offsets of their masters
        return self._gradient_slabs[master.dtype][start : start + master.numel()]

    def synchronize(self) -> None:
        """Wait until the last step is complete; EngineError if it failed."""
        for task in self._tasks:
            task.wait()

    def enqueue(
        self, units: Sequence[ShardedUnit], update: HostUpdateFn, scalars: HostScalars
    ) -> Mapping[str, UnitStep]:
        """Start to step `units` in this order; return the steps of units with trained masters."""
        started: dict[str, UnitStep] = {}
        steps: list[_Step] = []
        for unit in units:
            unit_steps = [_Step(each, *_take_gradient(each)) for each in unit.trained_buffers]
            if unit_steps:
                unit_steps[-1].task = task = HostTask()
                started[unit.name] = UnitStep(task, [each.on_device for each in unit_steps])
                steps += unit_steps
        self._tasks = tasks = [each.task for each in started.values()]
        after = self._copier.record_event()

        def work() -> None:
            try:
                self._run(steps, update, scalars, after)
            except BaseException as error:
                for task in tasks:
                    # Completed tasks fail too: other units of the step are missing.
                    task.end(error=error)

        self._worker.submit(work)
        return started

    def _run(
        self, steps: Sequence[_Step], update: HostUpdateFn, scalars: HostScalars, after: CudaEvent
    ) -> None:
        if after is not None and any(each.buffer.is_on_host for each in steps):
            after.synchronize()  # copies to the device may still read the parameters to be written
        gradients = self._fetch_all(steps, after)
        fetched = (self._fetch_scalar(*each, after) for each in enumerate(scalars))
        host_scalars = HostScalars(*fetched)
        for step, gradient in zip(steps, gradients, strict=True):
            ready = None
            if gradient is not None and gradient.numel():
                ready = self._step(step, gradient, update, host_scalars, after)
            del gradient  # after the end of the task, its memory may be freed
            if step.task is not None:
                step.task.end(ready)

    def _fetch_scalar(self, index: int, value: Tensor | None, after: CudaEvent) -> Tensor | None:
        if value is None:
            return None
        target = self._scalars[index]
        arrived = self._copier.copy_to_host(target, value, after)
        if arrived is not None:
            arrived.synchronize()
        return target

    def _fetch_all(self, steps: Sequence[_Step], after: CudaEvent) -> Iterator[Tensor | None]:
        # One fetch ahead, not more: the ring has two buffers, and a third fetch would overwrite the
        # gradient that is being stepped.
        fetches = [self._fetch(each, after) for each in steps[:1]]
        for index in range(len(steps)):
            fetches += [self._fetch(each, after) for each in steps[index + 1 : index + 2]]
            gradient, arrived = fetches.pop(0)
            if arrived is not None:
                arrived.synchronize()
            yield gradient

    def _fetch(self, step: _Step, after: CudaEvent) -> tuple[Tensor | None, CudaEvent]:
        if step.offloaded is not None:
            return step.offloaded.values, step.offloaded.arrived
        if not step.on_device or not step.on_device[0].numel():
            return None, None
        source = step.on_device[0]
        _, target = self._gradient_ring.take(source.numel(), source.dtype)
        return target, self._copier.copy_to_host(target, source, after)

    def _step(
        self,
        step: _Step,
        gradient: Tensor,
        update: HostUpdateFn,
        scalars: HostScalars,
        after: CudaEvent,
    ) -> CudaEvent:
        shard, target, stays_on_host = step.buffer.shard, step.target(), step.buffer.is_on_host
        master = shard.param.detach()
        index, cast = -1, master  # -1: no buffer of the ring is used
        if target.dtype != master.dtype and stays_on_host:
            cast = target
        elif target.dtype != master.dtype:
            index, cast = self._cast_ring.take(master.numel(), target.dtype)
        num_stepped = 0

        def on_stepped(span: Span) -> None:
            nonlocal num_stepped
            num_stepped += span.numel
            if cast is not master:
                shard.view(cast, span).copy_(shard.view(master, span))

        update(shard, gradient, scalars, on_stepped)
        if num_stepped < master.numel() and cast is not master:
            cast.copy_(master)  # parameters without a gradient are copied to the device too
        if stays_on_host:
            return None
        # Without a cast, this copy reads the masters. The next step writes them only after its
        # gradient has arrived, which the stream produces after waiting for this copy.
        ready = self._copier.copy_to_device(target, cast, after)
        if index >= 0:
            self._cast_ring.in_use_until[index] = ready
        return ready


def _take_gradient(buffer: FlatBuffer) -> tuple[list[Tensor], OffloadedGradient | None]:
    shard = buffer.shard
    gradient, offloaded = shard.grad, shard.offloaded_grad
    shard.grad = shard.offloaded_grad = None
    return [] if gradient is None else [gradient], offloaded
