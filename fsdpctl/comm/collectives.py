"""The interface of the collectives that the engine uses, implemented for a single rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from fsdpctl.comm.waits import HostWaits, Waits
from fsdpctl.plan.layout import Span
from fsdpctl.plan.step_plan import Transport

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AllGatherInput:
    """A buffer of an all-gather, in place: each rank's span of `full` is filled from that rank.

    This rank's span is first copied (and cast) from `shard`. Without a `shard`, the values are in
    `full` already, or arrive there by a copy that ends with `ready`.
    """

    full: Tensor
    spans: Sequence[Span]
    shard: Tensor | None = None
    ready: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True)
class Handle:
    """A collective in flight."""

    # Lets the current stream wait, and returns the result. Call it exactly once: until then, the
    # collective uses the memory of its inputs.
    wait: Callable[[], Tensor]

    @classmethod
    def after(cls, wait: Callable[[], object], result: Tensor) -> Self:
        """Return a handle that calls `wait()` and returns `result`."""

        def finish() -> Tensor:
            wait()
            return result

        return cls(finish)


class Reduction(Protocol):
    """A reduction in flight. The caller must keep its input until `finish` or `wait` returns."""

    workspace_nbytes: int  # bytes that the reduction has allocated

    def finish(self, out: Tensor, scale: float, dtype: torch.dtype) -> None:
        """Wait, and write this rank's shard of the sum times `scale` to `out`.

        `out` may be this rank's span of the input. `dtype` is used for additions on this rank.
        """

    def wait(self) -> None:
        """Wait, and discard the result."""


class Collectives:
    """The collectives of a set of ranks; reductions are sums. This base class is a single rank."""

    rank = 0
    size = 1
    waits: Waits = HostWaits()  # shared by all instances: a single rank never waits
    transport = Transport.GLOO
    not_shared_reason = ""  # why ranks that should share memory do not

    @property
    def shares_memory(self) -> bool:
        return self.transport is Transport.SHARED

    def allocate_shared(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return shared zeros of each size in bytes; [] if ranks share no memory. Collective."""
        return []

    def wait_for_readers(self) -> None:
        """Wait until no rank reads the shared parameters, before writing to them. Collective."""

    def reserve_outbox(self, nbytes: int) -> int:
        """Reserve shared memory to send `nbytes` of gradients; return its bytes. Collective."""
        return 0

    def use_separate_reduce_group(self) -> None:
        """Use a separate process group for reductions, so that gathers overlap. Collective."""

    def all_gather(self, buffers: Sequence[AllGatherInput]) -> Handle:
        """Gather several buffers as one collective; the result is the first buffer's `full`."""
        for each in buffers:
            if each.shard is not None:
                self._own_part(each).copy_(each.shard)

        def finish() -> Tensor:
            for each in buffers:
                if each.ready is not None:
                    torch.cuda.current_stream().wait_event(each.ready)
            return buffers[0].full

        return Handle(finish)

    def _own_part(self, buffer: AllGatherInput) -> Tensor:
        span = buffer.spans[self.rank]
        return buffer.full[span.start : span.stop]

    def reduce_scatter(self, full: Tensor, spans: Sequence[Span]) -> Reduction:
        """Start to sum the buffers `full` of all ranks; rank r receives `spans[r]` of the sum."""
        return InPlaceReduction(Handle(lambda: full))

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum `values` over the ranks in place, and return them."""
        return values

    def start_all_reduce(self, values: Tensor) -> Handle:
        """Start an all-reduce in place. Keep `values` until its handle has been waited for."""
        return Handle(lambda: values)

    def all_to_all(self, values: Tensor) -> Tensor:
        """Send row i of `values` to rank i; return the received rows in rank order."""
        return values.clone()

    def broadcast(self, values: Tensor, source: int = 0) -> Tensor:
        """Overwrite `values` with the values of rank `source`, and return them."""
        return values

    def all_gather_values(self, value: T) -> list[T]:
        """Return the values of all ranks in rank order: plain values or dataclasses. Collective."""
        return [value]

    def barrier(self) -> None:
        """Return once every rank has arrived."""


class InPlaceReduction:
    """A reduction whose result is a view of its input, which `handle` returns."""

    workspace_nbytes = 0

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def finish(self, out: Tensor, scale: float, dtype: torch.dtype) -> None:
        """Write the result times `scale`. This rank adds nothing: `dtype` has no effect."""
        total = self._handle.wait()
        if scale == 1 and out.data_ptr() == total.data_ptr():
            return
        if out.dtype == total.dtype:
            torch.mul(total, scale, out=out)
        else:
            out.copy_(total).mul_(scale)

    def wait(self) -> None:
        self._handle.wait()


class AsyncHostCopy:
    """An asynchronous copy to the host. Later writes on the current stream do not change it."""

    def __init__(self, values: Tensor) -> None:
        """Start the copy. On the CPU, `values` itself is kept: do not write to it."""
        self._values = values
        self._ready: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = values.to("cpu", non_blocking=True)
            self._ready = torch.cuda.current_stream().record_event()

    def tolist(self) -> list[float]:
        """Return the values; wait for the copy if necessary."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._values.tolist()


def count_flags(ranks: Collectives, flags: Sequence[bool], device: torch.device) -> AsyncHostCopy:
    """Start to count the ranks that set each of the `flags`; 0: no rank. Collective."""
    values = torch.tensor(flags, dtype=torch.float64)
    if device.type == "cuda":
        values = values.pin_memory().to(device, non_blocking=True)
    return AsyncHostCopy(ranks.all_reduce(values))
