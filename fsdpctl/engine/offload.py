"""Master weights and reduced gradients in host memory, stepped while the next forward runs.

The device stores this rank's shard of the parameters in the compute dtype. A thread of the host
steps unit by unit, in the order of the next forward. It copies the gradient from the device, steps
it in chunks that stay in the cache, casts each chunk at once, and copies the result to the device.

Note: why so little is pinned. Only memory that the device copies from or to must be pinned, and
pinning takes a second per few gigabytes. Two buffers per direction are enough, each as large as the
largest shard.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdpctl.comm.flat_shard import HostScalars, HostUpdateFn, OffloadedGradient, gradient_norms
from fsdpctl.engine.flat_buffer import FlatBuffer
from fsdpctl.engine.host_worker import Copier, HostTask, HostWorker, StreamEvent, T, wait_event
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
        self.in_use_until: list[StreamEvent] = [None] * HOST_BUFFERS  # the copy from each buffer
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
        """Start to copy a unit's gradients to the host, added to gradients that are there."""
        self._unit = unit
        for buffer in unit.trained_buffers:
            shard = buffer.shard
            gradient = shard.grad
            if gradient is None:
                continue
            if shard.offloaded_grad is not None:
                previous = torch.empty_like(gradient)
                wait_event(shard.offloaded_grad.arrived)
                wait_event(self._copier.to_device(previous, shard.offloaded_grad.values))
                gradient.add_(previous)
            (norm,) = gradient_norms([gradient])
            target = self._get_memory(buffer)
            arrived = self._copier.to_host(target, gradient)
            shard.offloaded_grad = OffloadedGradient(target, norm, arrived)

    def finish(self) -> ShardedUnit | None:
        """Free the gradients on the device that were copied last; return their unit.

        The stream waits for the copies first: the allocator could reuse the memory too early.
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
    gradients: list[Tensor]  # the gradient on the device, if any; cleared once it may be freed
    offloaded: OffloadedGradient | None  # the gradient in host memory
    task: HostTask | None  # the task of the unit, if this is its last buffer

    def target(self) -> Tensor:
        """Return the stored parameters that the step replaces."""
        assert self.buffer.resident is not None
        return self.buffer.resident.view(self.buffer.shard.span)


class HostStates:
    """This rank's master weights and gradients in host memory."""

    def __init__(self, worker: HostWorker, memory: HostMemory) -> None:
        self._worker = worker
        self.on_start: Callable[[HostUpdateFn, HostScalars], None]  # set by the runtime
        self._copier = Copier(worker.device)
        self._slabs = {
            torch_dtype(dtype): worker.allocate(
                numel, torch_dtype(dtype), pinned=dtype in memory.pinned
            )
            for dtype, numel in memory.masters.items()
        }
        self._num_taken = dict.fromkeys(self._slabs, 0)
        self._remainders = 0  # bytes
        self._gradients_on_host = {
            torch_dtype(of): worker.allocate(memory.masters[of], torch_dtype(dtype), pinned=True)
            for of, dtype in memory.gradients.items()
        }
        self._gradients = PinnedRing(worker, memory.gradient_buffers)
        self._cast = PinnedRing(worker, memory.cast_buffers)
        self._scalars = worker.allocate(len(HostScalars._fields), torch.float32, pinned=True)
        self._tasks: list[HostTask] = []

    @property
    def nbytes(self) -> int:
        """The bytes of master weights, gradients and buffers, without the optimizer's moments."""
        slabs = [*self._slabs.values(), *self._gradients_on_host.values()]
        buffers = self._gradients.nbytes + self._cast.nbytes + self._scalars.nbytes
        return sum(each.nbytes for each in slabs) + self._remainders + buffers

    def master(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory for the next buffer's master weights."""
        start = self._num_taken[dtype]
        self._num_taken[dtype] = start + numel
        return self._slabs[dtype][start : start + numel]

    def remainder(self, numel: int) -> Tensor:
        """Return zeroed memory for the remainders of a buffer's master weights."""
        self._remainders += numel
        return self.call(lambda: torch.zeros(numel, dtype=torch.int8))

    def start(self, update: HostUpdateFn, scalars: HostScalars) -> None:
        """Start to step all master weights; the step takes the gradients."""
        self.on_start(update, scalars)

    def call(self, function: Callable[[], T]) -> T:
        return self._worker.call(function)

    def gradients(self) -> GradientOffload | None:
        if not self._gradients_on_host:
            return None

        def get_memory(buffer: FlatBuffer) -> Tensor:
            master = buffer.shard.param
            start, numel = master.storage_offset(), master.numel()
            return self._gradients_on_host[master.dtype][start : start + numel]

        return GradientOffload(self._copier, get_memory)

    def synchronize(self) -> None:
        """Wait until the last step is complete; EngineError if it failed."""
        for job in self._tasks:
            job.wait()

    def step(
        self, units: Sequence[ShardedUnit], update: HostUpdateFn, scalars: HostScalars
    ) -> Mapping[str, tuple[HostTask, list[list[Tensor]]]]:
        """Start to step `units` in this order.

        Returns the task of each unit, with the unit's gradients on the device. Drop these after the
        task: copies to the host read them until then.
        """
        started: dict[str, tuple[HostTask, list[list[Tensor]]]] = {}
        steps: list[_Step] = []
        for unit in units:
            unit_steps = [_Step(each, *_take_gradient(each), None) for each in unit.trained_buffers]
            if unit_steps:
                unit_steps[-1].task = job = HostTask()
                started[unit.name] = job, [each.gradients for each in unit_steps]
                steps += unit_steps
        self._tasks = [job for job, _ in started.values()]
        jobs, after = self._tasks, self._copier.record_event()

        def work() -> None:
            try:
                self._run(steps, update, scalars, after)
            except BaseException as error:
                for job in jobs:
                    # Completed tasks fail too: other units of the step are missing.
                    job.end(error=error)

        self._worker.submit(work)
        return started

    def _run(
        self, steps: Sequence[_Step], update: HostUpdateFn, scalars: HostScalars, after: StreamEvent
    ) -> None:
        if after is not None and any(each.buffer.is_on_host for each in steps):
            after.synchronize()  # copies to the device may still read the parameters to be written
        gradients = self._fetch_all(steps, after)
        pairs = enumerate(scalars)
        host_scalars = (None if x is None else self._fetch_scalar(n, x, after) for n, x in pairs)
        on_host = HostScalars(*host_scalars)
        for step, gradient in zip(steps, gradients, strict=True):
            ready = None
            if gradient is not None and gradient.numel():
                ready = self._step(step, gradient, update, on_host, after)
            del gradient
            if step.task is not None:
                step.task.end(ready)

    def _fetch_scalar(self, number: int, value: Tensor, after: StreamEvent) -> Tensor:
        target = self._scalars[number]
        arrived = self._copier.to_host(target, value, after)
        if arrived is not None:
            arrived.synchronize()
        return target

    def _fetch_all(self, steps: Sequence[_Step], after: StreamEvent) -> Iterator[Tensor | None]:
        fetches = [self._fetch(each, after) for each in steps[:1]]
        for number in range(len(steps)):
            fetches += [self._fetch(each, after) for each in steps[number + 1 : number + 2]]
            gradient, arrived = fetches.pop(0)
            if arrived is not None:
                arrived.synchronize()
            yield gradient

    def _fetch(self, step: _Step, after: StreamEvent) -> tuple[Tensor | None, StreamEvent]:
        if step.offloaded is not None:
            return step.offloaded.values, step.offloaded.arrived
        if not step.gradients or not step.gradients[0].numel():
            return None, None
        source = step.gradients[0]
        _, target = self._gradients.take(source.numel(), source.dtype)
        return target, self._copier.to_host(target, source, after)

    def _step(
        self,
        step: _Step,
        gradient: Tensor,
        update: HostUpdateFn,
        scalars: HostScalars,
        after: StreamEvent,
    ) -> StreamEvent:
        shard, target, stays_on_host = step.buffer.shard, step.target(), step.buffer.is_on_host
        master = shard.param.detach()
        number, cast = -1, master
        if target.dtype != master.dtype:
            number, cast = (
                (-1, target) if stays_on_host else self._cast.take(master.numel(), target.dtype)
            )

        num_written = 0

        def written(span: Span) -> None:
            nonlocal num_written
            num_written += span.numel
            if cast is not master:
                shard.view(cast, span).copy_(shard.view(master, span))

        update(shard, gradient, scalars, written)
        if num_written < master.numel() and cast is not master:
            cast.copy_(master)  # parameters without a gradient are copied to the device too
        if stays_on_host:
            return None
        ready = self._copier.to_device(target, cast, after)
        if cast is not master:
            self._cast.in_use_until[number] = ready
        return ready


def _take_gradient(buffer: FlatBuffer) -> tuple[list[Tensor], OffloadedGradient | None]:
    shard = buffer.shard
    gradient, offloaded = shard.grad, shard.offloaded_grad
    shard.grad = shard.offloaded_grad = None
    return [] if gradient is None else [gradient], offloaded
