"""The collectives that the engine needs, over any process group or none."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fsdpctl.comm.waits import HostWaits, Waits
from fsdpctl.plan.layout import Span
from fsdpctl.plan.step_plan import Transport

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AllGatherInput:
    """A buffer of an all-gather: every rank's part of `whole` is filled in place from that rank.

    This rank's part is first copied (and cast) from `shard`, if any; otherwise it is there once
    `arrived` is reached.
    """

    full: Tensor
    spans: Sequence[Span]
    shard: Tensor | None = None
    ready: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True)
class Handle:
    """A collective in flight."""

    wait: Callable[[], Tensor]  # returns the result for the current stream; to be called once


class Reduction(Protocol):
    """A reduction in flight. It owns the given gradients until `finish` or `wait` is called."""

    workspace_nbytes: int  # allocated for it

    def finish(self, out: Tensor, scale: float, dtype: torch.dtype) -> None:
        """Wait, and write this rank's part of the sum times `scale` to `out`.

        `out` may be its part of the given buffer; `dtype` is that of the additions, if it adds.
        """

    def wait(self) -> None:
        """Wait, and discard the result."""


class Collectives:
    """A set of ranks and their collectives, all of which sum. This base class is a single rank."""

    rank = 0
    size = 1
    waits: Waits = HostWaits()
    transport = Transport.GLOO
    not_shared_reason = ""  # why the ranks do not share memory, if they were to

    @property
    def shares_memory(self) -> bool:
        return self.transport is Transport.SHARED

    def allocate_shared(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return bytes of zeros of each size, if the ranks share memory. Collective."""
        return []

    def wait_for_readers(self) -> None:
        """Before parameters are written: if ranks share them, wait until none reads them."""

    def reserve_outbox(self, nbytes: int) -> int:
        """Return the bytes that are kept to have reductions of `nbytes` in flight. Collective."""
        return 0

    def use_own_reduce_group(self) -> None:
        """Let reductions overlap with gathers from now on. Collective."""

    def all_gather(self, buffers: Sequence[AllGatherInput]) -> Handle:
        """Gather several buffers as one collective; the result is the first buffer's `whole`."""
        for each in buffers:
            if each.shard is not None:
                self._own_span(each).copy_(each.shard)

        def finish() -> Tensor:
            for each in buffers:
                if each.ready is not None:
                    torch.cuda.current_stream().wait_event(each.ready)
            return buffers[0].full

        return Handle(finish)

    def _own_span(self, buffer: AllGatherInput) -> Tensor:
        own = buffer.spans[self.rank]
        return buffer.full[own.start : own.stop]

    def reduce_scatter(self, whole: Tensor, parts: Sequence[Span]) -> Reduction:
        """Start to add the ranks' gradients; each rank receives its part of the sum."""
        return InPlaceReduction(Handle(lambda: whole))

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum `values` over the ranks in place, and return them."""
        return values

    def start_all_reduce(self, values: Tensor) -> Handle:
        """Start an all-reduce, which owns `values` until its handle has been waited for."""
        return Handle(lambda: values)

    def all_to_all(self, values: Tensor) -> Tensor:
        """Return what each rank sent here, in rank order; row i of `values` is sent to rank i."""
        return values.clone()

    def broadcast(self, values: Tensor, source: int = 0) -> Tensor:
        """Overwrite `values` with those of rank `source`, and return them."""
        return values

    def all_gather_object(self, value: T) -> list[T]:
        """Return the values of all ranks in rank order; all are plain values or dataclasses."""
        return [value]

    def barrier(self) -> None:
        """Return once every rank has arrived."""


class InPlaceReduction:
    """A reduction whose result is a window of the given buffer, which `handle` returns."""

    workspace_nbytes = 0

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def finish(self, out: Tensor, scale: float, dtype: torch.dtype) -> None:
        """Write the result times `scale`, in one kernel if the dtypes are equal."""
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
    """A copy of `values` on its way to the host. Later writes to `values` do not change it."""

    def __init__(self, values: Tensor) -> None:
        """Start the copy; on the CPU, take ownership of `values` instead."""
        self._values = values
        self._ready: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = values.to("cpu", non_blocking=True)
            self._ready = torch.cuda.current_stream().record_event()

    def tolist(self) -> list[float]:
        """Return the values. May wait for the device."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._values.tolist()


def any_rank_flags(
    ranks: Collectives, flags: Sequence[bool], device: torch.device
) -> AsyncHostCopy:
    """Start to count the ranks that have raised each of the flags. Collective."""
    own = torch.tensor(flags, dtype=torch.float64)
    if device.type == "cuda":
        own = own.pin_memory().to(device, non_blocking=True)
    return AsyncHostCopy(ranks.all_reduce(own))
