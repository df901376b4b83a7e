"""Collectives over gloo.

Note: why gloo's own reductions are not used. gloo's reduce-scatter is an all-reduce of the full
buffer, in ring order. Here, each rank sends every other rank the elements that the other rank owns,
and adds what it receives in rank order. This moves half the bytes. The order of additions does not
depend on the owner of an element, so every strategy gives the same bits.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fsdpctl.comm.collectives import AllGatherInput, Handle, Reduction
from fsdpctl.comm.flight_recorder import UNRECORDED
from fsdpctl.comm.process_group import ProcessGroupCollectives
from fsdpctl.plan.layout import Span
from fsdpctl.plan.step_plan import SUM_CHUNK


class GlooCollectives(ProcessGroupCollectives):
    """The collectives on the CPU, which run in gloo's threads."""

    def all_gather(self, buffers: Sequence[AllGatherInput]) -> Handle:
        """Send every other rank this rank's span. Unlike in broadcasts, sends overlap receives."""
        works = []
        for each in buffers:
            source = self._own_part(each)
            if each.shard is not None:
                source.copy_(each.shard)
            targets = [each.full[part.start : part.stop] for part in each.spans]
            works += self._exchange([source] * self.size, targets, self.group)
        return Handle.after(self._waiter(works, "all-gather"), buffers[0].full)

    def reduce_scatter(self, full: Tensor, spans: Sequence[Span]) -> Reduction:
        """Send each rank its span. `finish` then adds the spans received from other ranks."""
        inputs = [full[span.start : span.stop] for span in spans]
        shard = inputs[self.rank]
        workspace = shard.new_empty(self.size - 1, shard.numel())
        rows = list(workspace)
        rows.insert(self.rank, shard)
        works = self._exchange(inputs, rows, self.reduce_group)
        return LocalReduction(rows, workspace.nbytes, self._waiter(works, "reduce-scatter"))

    def _exchange(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], group: dist.ProcessGroup
    ) -> list[dist.Work]:
        """Start to exchange messages with every other rank; empty messages are not sent."""
        others = [each for each in range(self.size) if each != self.rank]
        sources = [n for n in others if outputs[n].numel()]
        targets = [n for n in others if inputs[n].numel()]
        works = [dist.irecv(outputs[n], group=group, group_src=n) for n in sources]
        works += [dist.isend(inputs[n], group=group, group_dst=n) for n in targets]
        return [work for work in works if work is not None]  # None only outside the group

    def start_all_reduce(self, values: Tensor) -> Handle:
        work = dist.all_reduce(values, group=self.reduce_group, async_op=True)
        assert isinstance(work, dist.Work)
        return Handle.after(self._waiter([work], "all-reduce"), values)

    def _waiter(self, works: list[dist.Work], name: str) -> Callable[[], None]:
        return partial(self.waits.measure, partial(_wait_all, works, f"{name} over gloo"))


def _wait_all(works: list[dist.Work], name: str) -> None:
    UNRECORDED.pending = name  # torch's flight recorder lacks gloo's `isend` and `irecv`
    while works:
        works.pop().wait()
    UNRECORDED.pending = ""


class LocalReduction:
    """The contributions of all ranks to this rank's shard, which this rank adds itself."""

    def __init__(
        self,
        rows: Sequence[Tensor],
        workspace_nbytes: int,
        wait_for_rows: Callable[[], None],
        on_read: Callable[[], None] = lambda: None,
    ) -> None:
        """Keep the `rows`, contributions in rank order; `wait_for_rows()` blocks until they arrive.

        `on_read()` is called after their last use: then other ranks may overwrite them.
        """
        self.workspace_nbytes = workspace_nbytes
        self._rows, self._wait_for_rows, self._on_read = rows, wait_for_rows, on_read

    def wait(self) -> None:
        self._wait_for_rows()
        self._on_read()

    def finish(self, out: Tensor, scale: float, dtype: torch.dtype) -> None:
        """Add in rank order, in chunks that stay in the cache."""
        self._wait_for_rows()
        for start in range(0, len(out), SUM_CHUNK):
            chunk = slice(start, start + SUM_CHUNK)
            first, *others = (each[chunk] for each in self._rows)
            total = first.to(dtype)  # `first` itself if it has `dtype`; contributions do not change
            for each in others:
                total = total + each if total is first else total.add_(each)
            # `out` may be the memory of a contribution, so it is written after the last addition.
            torch.mul(total, scale, out=out[chunk])
        self._on_read()
