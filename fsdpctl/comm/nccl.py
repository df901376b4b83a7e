"""Collectives over NCCL."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from fsdpctl.comm.collectives import AllGatherInput, Handle, InPlaceReduction, Reduction
from fsdpctl.comm.process_group import (
    Groups,
    ProcessGroupCollectives,
    all_gather_single,
    reduce_scatter_single,
)
from fsdpctl.comm.waits import CudaWaits, Waits
from fsdpctl.errors import EngineError
from fsdpctl.plan.layout import Span, are_even
from fsdpctl.plan.step_plan import Transport


class NcclCollectives(ProcessGroupCollectives):
    """The collectives on CUDA: gathers and reductions have a stream each.

    Memory is allocated on the compute stream only, and freed after the compute stream has waited
    for its last use. Otherwise, each tensor would need `record_stream`. A collective's stream first
    waits for the compute stream, which writes inputs. A `shard` must outlive its all-gather.
    """

    transport = Transport.NCCL
    _device_type = "cuda"

    def __init__(
        self, device: torch.device, groups: Groups | None = None, purpose: str = "gather"
    ) -> None:
        """Join this rank's group; EngineError if `device` is not the current device."""
        current = torch.cuda.current_device()
        if device.index not in (None, current):
            raise EngineError(
                f"the model is on cuda:{device.index} and the current device is cuda:{current}; "
                "call torch.cuda.set_device first"
            )
        super().__init__(groups, purpose)
        self._device = torch.device("cuda", current)
        self.waits: Waits = CudaWaits()
        self.gather_stream = torch.cuda.Stream(device, priority=-1)
        self.reduce_stream = torch.cuda.Stream(device, priority=-1)

    def all_gather(self, buffers: Sequence[AllGatherInput]) -> Handle:
        """Gather on the gather stream, in one launch per dtype if the spans are even."""
        # Kernels on the current stream may still read the old contents of this memory. A prefetch
        # is issued before the running unit's work, so it does not wait for that work.
        self.gather_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.gather_stream):
            by_dtype: dict[torch.dtype, list[AllGatherInput]] = defaultdict(list)
            for each in buffers:
                if each.shard is not None:
                    self._own_part(each).copy_(each.shard)
                if each.ready is not None:
                    self.gather_stream.wait_event(each.ready)
                if are_even(each.spans):
                    by_dtype[each.full.dtype].append(each)
                    continue
                with self._one_launch(self.group):
                    for owner, part in enumerate(each.spans):
                        if part.numel:
                            values = each.full[part.start : part.stop]
                            dist.broadcast(values, group=self.group, group_src=owner)
            for inputs in by_dtype.values():
                # Torch merges the all-gathers of a `with` block into one launch, given one dtype.
                coalesced: AbstractContextManager[object] = (
                    dist.distributed_c10d._coalescing_manager(self.group)
                    if len(inputs) > 1
                    else nullcontext()
                )
                with coalesced:
                    for each in inputs:
                        all_gather_single(each.full, self._own_part(each), group=self.group)
            done = self.gather_stream.record_event()
        return self._handle(done, buffers[0].full)

    def reduce_scatter(self, full: Tensor, spans: Sequence[Span]) -> Reduction:
        """Reduce in place on the reduce stream; NCCL adds in the dtype that it sends."""
        span = spans[self.rank]
        shard = full[span.start : span.stop]
        self.reduce_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.reduce_stream):
            if are_even(spans):
                reduce_scatter_single(shard, full, group=self.reduce_group)
            else:
                with self._one_launch(self.reduce_group):
                    for owner, part in enumerate(spans):
                        if part.numel:
                            values = full[part.start : part.stop]
                            dist.reduce(values, group=self.reduce_group, group_dst=owner)
            done = self.reduce_stream.record_event()
        return InPlaceReduction(self._handle(done, shard))

    def chain(
        self,
        follow: Callable[[Tensor], Handle],
        reduction: Reduction,
        out: Tensor,
        scale: float,
        dtype: torch.dtype,
    ) -> tuple[Handle, Handle]:
        """Run a reduction's `finish` on the reduce stream, then start `follow` with its result.

        The compute stream waits for neither. Returns two handles: the first ends once the
        reduction's input has been read and may be freed, the second is the handle of `follow`.
        """
        # `out` may be memory that kernels on the current stream still use.
        self.reduce_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.reduce_stream):
            reduction.finish(out, scale, dtype)
            done = self.reduce_stream.record_event()
            return self._handle(done, out), follow(out)

    def start_all_reduce(self, values: Tensor) -> Handle:
        self.reduce_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.reduce_stream):
            dist.all_reduce(values, group=self.reduce_group)
            done = self.reduce_stream.record_event()
        return self._handle(done, values)

    def _one_launch(self, group: dist.ProcessGroup) -> AbstractContextManager[object]:
        """Launch the broadcasts or reductions in a `with` block as one NCCL group."""
        # Without a device, torch's manager would launch each broadcast or reduction separately.
        return dist.distributed_c10d._coalescing_manager(group, self._device)

    def _handle(self, done: torch.cuda.Event, result: Tensor) -> Handle:
        def wait() -> None:
            self.waits.measure(lambda: torch.cuda.current_stream().wait_event(done))

        return Handle.after(wait, result)
