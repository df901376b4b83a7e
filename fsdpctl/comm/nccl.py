"""Collectives over NCCL."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fsdpctl.comm.base import Gathering, Handle, InPlace, Reduction, Stretches
from fsdpctl.comm.contributions import Received
from fsdpctl.comm.process_group import (
    ProcessGroupCollectives,
    all_gather_single,
    reduce_scatter_single,
)
from fsdpctl.comm.waits import CudaWaits, Waits
from fsdpctl.errors import EngineError
from fsdpctl.plan.layout import Span, are_even
from fsdpctl.plan.transport import Transport, adds_whole


class NcclCollectives(ProcessGroupCollectives):
    """Collectives on CUDA, gathers and reductions on a stream each.

    Memory is allocated on the compute stream only and given back after the compute stream has
    waited for its last use, so no tensor needs `record_stream`. A shard that is copied from must
    outlive its all-gather.
    """

    _device_type = "cuda"
    exchanges = True

    def __init__(self, device: torch.device, groups: Sequence[Sequence[int]] | None = None) -> None:
        """Join one of `groups`; None: all ranks.

        Raises:
            EngineError: the device is not the current one, whose streams would be waited for.
        """
        current = torch.cuda.current_device()
        if device.index not in (None, current):
            raise EngineError(
                f"the model is on cuda:{device.index} and the current device is cuda:{current}: "
                "call torch.cuda.set_device first"
            )
        super().__init__(groups)
        self.waits: Waits = CudaWaits()
        self.gather_stream = torch.cuda.Stream(device, priority=-1)
        self.reduce_stream = torch.cuda.Stream(device, priority=-1)

    def all_gather(self, whole: Tensor, parts: Sequence[Span], shard: Tensor | None) -> Handle:
        """On the gather stream."""
        return self.gather_together([Gathering(whole, parts, shard)])

    def gather_together(self, buffers: Sequence[Gathering]) -> Handle:
        """On the gather stream, in one launch where parts are even and dtypes are one."""
        # Whoever used this memory before did so on the current stream; a prefetch is issued
        # before the running unit's work, so it overlaps with that.
        self.gather_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.gather_stream):
            together: dict[torch.dtype, list[Gathering]] = defaultdict(list)
            for each in buffers:
                if each.shard is not None:
                    self._own(each).copy_(each.shard)
                if are_even(each.parts):
                    together[each.whole.dtype].append(each)
                else:
                    for work in self.start_broadcasts(each.whole, each.parts):
                        work.wait()
            for alike in together.values():
                with self._one_launch(len(alike)):
                    for each in alike:
                        all_gather_single(each.whole, self._own(each), group=self.gather_group)
            done = self.gather_stream.record_event()
        return self._after(done, buffers[0].whole)

    def _own(self, buffer: Gathering) -> Tensor:
        """This rank's part."""
        own = buffer.parts[self.rank]
        return buffer.whole[own.start : own.stop]

    def _one_launch(self, count: int) -> AbstractContextManager[object]:
        """All-gathers that are called within become one; torch wants one dtype for that."""
        if count < 2:
            return nullcontext()
        manager: AbstractContextManager[object] = dist.distributed_c10d._coalescing_manager(
            self.gather_group
        )
        return manager

    def sends_in_place(self, parts: Sequence[Span]) -> bool:
        """One buffer has all, and is aligned."""
        return False

    @property
    def adds_whole(self) -> bool:
        """NCCL knows best how."""
        return adds_whole(Transport.NCCL, self.size)

    def reduce_scatter(
        self, gradients: Stretches, parts: Sequence[Span], dtype: torch.dtype
    ) -> Reduction:
        """On the reduce stream: in place, or where it is sent in another dtype by the owners."""
        ((_, whole),) = gradients
        own = parts[self.rank]
        if whole.dtype != dtype:
            return self._exchange(gradients, parts)
        part = whole[own.start : own.stop]
        self.reduce_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.reduce_stream):
            if are_even(parts):
                reduce_scatter_single(part, whole, group=self.reduce_group)
            else:
                for owner, span in enumerate(parts):
                    if span.numel:
                        dist.reduce(
                            whole[span.start : span.stop],
                            group=self.reduce_group,
                            group_dst=owner,
                        )
            done = self.reduce_stream.record_event()
        return InPlace(self._after(done, part))

    def _exchange(self, gradients: Stretches, parts: Sequence[Span]) -> Reduction:
        """Each rank receives the others' contributions to its part, and adds them."""
        ((_, whole),) = gradients
        own = parts[self.rank]
        received = whole.new_empty(self.size * own.numel)
        self.reduce_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.reduce_stream):
            dist.all_to_all_single(
                received,
                whole,
                [own.numel] * self.size,
                [part.numel for part in parts],
                group=self.reduce_group,
            )
            done = self.reduce_stream.record_event()
        rows = received.view(self.size, own.numel)
        return Received(whole, rows, partial(self._wait, done))

    def chain(
        self,
        follow: Callable[[Tensor], Handle],
        reduction: Reduction,
        out: Tensor,
        scale: float,
        dtype: torch.dtype,
    ) -> tuple[Handle, Handle]:
        """A reduction's `finish` on the reduce stream, then what `follow` starts with the result.

        The compute stream waits for neither. The first handle is done when the gradients that were
        given are no longer read, the second is that of `follow`.
        """
        self.reduce_stream.wait_stream(torch.cuda.current_stream())  # `out` was somebody else's
        with torch.cuda.stream(self.reduce_stream):
            reduction.finish(out, scale, dtype)
            done = self.reduce_stream.record_event()
            return self._after(done, out), follow(out)

    def start_all_reduce(self, values: Tensor, *, at_once: bool = True) -> Handle:
        """On the reduce stream, always at once."""
        self.reduce_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.reduce_stream):
            dist.all_reduce(values, group=self.reduce_group)
            done = self.reduce_stream.record_event()
        return self._after(done, values)

    def _after(self, done: torch.cuda.Event, result: Tensor) -> Handle:
        def finish() -> Tensor:
            self._wait(done)
            return result

        return Handle(finish)

    def _wait(self, done: torch.cuda.Event) -> None:
        self.waits.around(lambda: torch.cuda.current_stream().wait_event(done))
