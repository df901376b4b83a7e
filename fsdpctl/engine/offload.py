"""Master weights and reduced gradients in host memory, and their step behind the next forward.

The device keeps this rank's part of the parameters in the compute dtype. A thread of the host steps
unit by unit, in the order of the next forward: the gradient comes from the device, is stepped in
pieces that stay in the cache, each of which is cast at once, and the result goes to the device.

Note: why so little is pinned. Only memory that the device copies from or to has to be, and pinning
takes a second per few gigabytes: two buffers for each direction, of the largest part's size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdpctl.comm.flat_shard import HostScalars, HostUpdate, OffloadedGradient, gradient_norms
from fsdpctl.engine.flat_buffer import FlatBuffer
from fsdpctl.engine.host_worker import Copier, HostTask, HostWorker, StreamEvent, T, wait_event
from fsdpctl.engine.unit import ShardedUnit
from fsdpctl.models.module_spec import torch_dtype
from fsdpctl.plan.layout import Span
from fsdpctl.plan.step_plan import HOST_BUFFERS, HostMemory


class PinnedRing:
    """Pinned buffers that are used in turn."""

    def __init__(self, worker: HostWorker, nbytes: int) -> None:
        self._slots: list[Tensor] = []
        if nbytes:
            slab = worker.allocate(HOST_BUFFERS * nbytes, torch.uint8, pinned=True)
            self._slots = list(slab.split(nbytes))
        self.busy: list[StreamEvent] = [None] * HOST_BUFFERS  # until when each is used
        self._next = 0

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._slots)

    def take(self, numel: int, dtype: torch.dtype) -> tuple[int, Tensor]:
        """Return the number of the next buffer and a window of it, once the device has read it."""
        number = self._next
        self._next = (number + 1) % HOST_BUFFERS
        event, self.busy[number] = self.busy[number], None
        if event is not None:
            event.synchronize()
        return number, self._slots[number][: numel * dtype.itemsize].view(dtype)


class GradientOffload:
    """Takes the reduced gradients of units to the host, one unit at a time during backward."""

    def __init__(self, copier: Copier, place: Callable[[FlatBuffer], Tensor]) -> None:
        """`place` returns the host memory for a buffer's gradient."""
        self._copier, self._place = copier, place
        self._unit: ShardedUnit | None = None

    @torch.no_grad()
    def start(self, unit: ShardedUnit) -> None:
        """Start to send a unit's gradients, added to those that the host has."""
        self._unit = unit
        for buffer in unit.trained_buffers:
            shard = buffer.shard
            gradient = shard.grad
            if gradient is None:
                continue
            if shard.offloaded_grad is not None:
                before = torch.empty_like(gradient)
                wait_event(shard.offloaded_grad.arrived)
                wait_event(self._copier.to_device(before, shard.offloaded_grad.values))
                gradient.add_(before)
            (norm,) = gradient_norms([gradient])
            target = self._place(buffer)
            shard.offloaded_grad = OffloadedGradient(
                target, norm, self._copier.to_host(target, gradient)
            )

    def finish(self) -> ShardedUnit | None:
        """Free the gradients on the device that were sent last; return their unit."""
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
    gradients: list[Tensor]  # its gradient on the device; emptied when it may be freed
    left: OffloadedGradient | None  # if the host has it
    job: HostTask | None  # of its unit, which ends with this buffer

    def sent(self) -> Tensor:
        """Return the parameters at rest that the step replaces."""
        assert self.buffer.resident is not None
        return self.buffer.resident.view(self.buffer.shard.span)


class HostStates:
    """This rank's states in host memory."""

    def __init__(self, worker: HostWorker, memory: HostMemory) -> None:
        self._worker = worker
        self.on_start: Callable[[HostUpdate, HostScalars], None]  # set by the runtime
        self._copier = Copier(worker.device)
        self._slabs = {
            torch_dtype(dtype): worker.allocate(
                numel, torch_dtype(dtype), pinned=dtype in memory.pinned
            )
            for dtype, numel in memory.masters.items()
        }
        self._taken = dict.fromkeys(self._slabs, 0)
        self._remainders = 0  # bytes
        self._left = {
            torch_dtype(of): worker.allocate(memory.masters[of], torch_dtype(dtype), pinned=True)
            for of, dtype in memory.gradients.items()
        }
        self._gradients = PinnedRing(worker, memory.gradient_buffers)
        self._cast = PinnedRing(worker, memory.cast_buffers)
        self._scalars = worker.allocate(len(HostScalars._fields), torch.float32, pinned=True)
        self._jobs: list[HostTask] = []

    @property
    def nbytes(self) -> int:
        """The bytes of master weights and buffers; the optimizer has its moments."""
        slabs = sum(each.nbytes for of in (self._slabs, self._left) for each in of.values())
        buffers = self._gradients.nbytes + self._cast.nbytes + self._scalars.nbytes
        return slabs + self._remainders + buffers

    def master(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory for the next buffer's master weights."""
        start = self._taken[dtype]
        self._taken[dtype] = start + numel
        return self._slabs[dtype][start : start + numel]

    def remainder(self, numel: int) -> Tensor:
        """Return memory for the lower bits of a buffer's master weights, which are zeros."""
        self._remainders += numel
        return self.call(lambda: torch.zeros(numel, dtype=torch.int8))

    def start(self, update: HostUpdate, scalars: HostScalars) -> None:
        """Start to step all master weights; the step takes the gradients."""
        self.on_start(update, scalars)

    def call(self, function: Callable[[], T]) -> T:
        return self._worker.call(function)

    def gradients(self) -> GradientOffload | None:
        if not self._left:
            return None

        def place(buffer: FlatBuffer) -> Tensor:
            master = buffer.shard.param
            start, numel = master.storage_offset(), master.numel()
            return self._left[master.dtype][start : start + numel]

        return GradientOffload(self._copier, place)

    def synchronize(self) -> None:
        """Wait until masters are what the last step makes of them; EngineError if it failed."""
        for job in self._jobs:
            job.wait()

    def step(
        self, units: Sequence[ShardedUnit], update: HostUpdate, scalars: HostScalars
    ) -> Mapping[str, tuple[HostTask, list[list[Tensor]]]]:
        """Start to step `units` in this order.

        Returns for each its job, and the gradients on the device, to be dropped after the job.
        """
        found: dict[str, tuple[HostTask, list[list[Tensor]]]] = {}
        steps: list[_Step] = []
        for unit in units:
            of_unit = [_Step(each, *_taken(each), None) for each in unit.trained_buffers]
            if of_unit:
                of_unit[-1].job = job = HostTask()
                found[unit.name] = job, [each.gradients for each in of_unit]
                steps += of_unit
        self._jobs = [job for job, _ in found.values()]
        jobs, after = self._jobs, self._copier.record_event()

        def work() -> None:
            try:
                self._run(steps, update, scalars, after)
            except BaseException as error:
                for job in jobs:
                    job.end(error=error)  # also those that are done: their step is incomplete

        self._worker.submit(work)
        return found

    def _run(
        self, steps: Sequence[_Step], update: HostUpdate, scalars: HostScalars, after: StreamEvent
    ) -> None:
        if after is not None and any(each.buffer.is_on_host for each in steps):
            after.synchronize()  # copies of the parameters may read what the step writes
        fetched = self._fetched(steps, after)
        pairs = enumerate(scalars)
        found = (None if x is None else self._fetch_scalar(n, x, after) for n, x in pairs)
        on_host = HostScalars(*found)
        for step, gradient in zip(steps, fetched, strict=True):
            ready = None
            if gradient is not None and gradient.numel():
                ready = self._step(step, gradient, update, on_host, after)
            del gradient
            if step.job is not None:
                step.job.end(ready)

    def _fetch_scalar(self, number: int, value: Tensor, after: StreamEvent) -> Tensor:
        target = self._scalars[number]
        arrived = self._copier.to_host(target, value, after)
        if arrived is not None:
            arrived.synchronize()
        return target

    def _fetched(self, steps: Sequence[_Step], after: StreamEvent) -> Iterator[Tensor | None]:
        ahead = [self._fetch(each, after) for each in steps[:1]]
        for number in range(len(steps)):
            ahead += [self._fetch(each, after) for each in steps[number + 1 : number + 2]]
            gradient, arrived = ahead.pop(0)
            if arrived is not None:
                arrived.synchronize()
            yield gradient

    def _fetch(self, step: _Step, after: StreamEvent) -> tuple[Tensor | None, StreamEvent]:
        if step.left is not None:
            return step.left.values, step.left.arrived
        if not step.gradients or not step.gradients[0].numel():
            return None, None
        source = step.gradients[0]
        _, target = self._gradients.take(source.numel(), source.dtype)
        return target, self._copier.to_host(target, source, after)

    def _step(
        self,
        step: _Step,
        gradient: Tensor,
        update: HostUpdate,
        scalars: HostScalars,
        after: StreamEvent,
    ) -> StreamEvent:
        shard, sent, stays = step.buffer.shard, step.sent(), step.buffer.is_on_host
        master = shard.param.detach()
        number, cast = -1, master
        if sent.dtype != master.dtype:
            number, cast = (-1, sent) if stays else self._cast.take(master.numel(), sent.dtype)

        num_written = 0

        def written(span: Span) -> None:
            nonlocal num_written
            num_written += span.numel
            if cast is not master:
                shard.view(cast, span).copy_(shard.view(master, span))

        update(shard, gradient, scalars, written)
        if num_written < master.numel() and cast is not master:
            cast.copy_(master)  # parameters without gradients are sent too
        if stays:
            return None
        ready = self._copier.to_device(sent, cast, after)
        if cast is not master:
            self._cast.busy[number] = ready
        return ready


def _taken(buffer: FlatBuffer) -> tuple[list[Tensor], OffloadedGradient | None]:
    shard = buffer.shard
    gradient, left = shard.grad, shard.offloaded_grad
    shard.grad = shard.offloaded_grad = None
    return [] if gradient is None else [gradient], left
