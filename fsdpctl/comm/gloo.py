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
        """Send this rank's span to every other rank. Unlike broadcasts, both directions overlap."""
        works = []
        for each in buffers:
            source = self._own_span(each)
            if each.shard is not None:
                source.copy_(each.shard)
            targets = [each.full[part.start : part.stop] for part in each.spans]
            works += self._exchange([source] * self.size, targets, self.group)
        return self._after(works, buffers[0].full, "all-gather")

    def reduce_scatter(self, full: Tensor, spans: Sequence[Span]) -> Reduction:
        """Send each rank its span. `finish` then adds the spans received from other ranks."""
        inputs = [full[span.start : span.stop] for span in spans]
        shard = inputs[self.rank]
        workspace = shard.new_empty(self.size - 1, shard.numel())
        rows = list(workspace)
        rows.insert(self.rank, shard)
        works = self._exchange(inputs, rows, self.reduce_group)
        return LocalReduction(rows, workspace.nbytes, self._wait(works, "reduce-scatter"))

    def _exchange(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], group: dist.ProcessGroup
    ) -> list[dist.Work]:
        """Start to exchange messages with every other rank; empty messages are not sent."""
        others = [each for each in range(self.size) if each != self.rank]
        sources, targets = ([n for n in others if each[n].numel()] for each in (outputs, inputs))
        works = [dist.irecv(outputs[n], group=group, group_src=n) for n in sources]
        works += [dist.isend(inputs[n], group=group, group_dst=n) for n in targets]
        return [work for work in works if work is not None]

    def start_all_reduce(self, values: Tensor) -> Handle:
        work = dist.all_reduce(values, group=self.reduce_group, async_op=True)
        assert isinstance(work, dist.Work)
        return self._after([work], values, "all-reduce")

    def _after(self, works: list[dist.Work], result: Tensor, name: str) -> Handle:
        wait = self._wait(works, name)

        def finish() -> Tensor:
            wait()
            return result

        return Handle(finish)

    def _wait(self, works: list[dist.Work], name: str) -> Callable[[], None]:
        return partial(self.waits.measure, partial(_wait_for, works, f"{name} over gloo"))


def _wait_for(works: list[dist.Work], name: str) -> None:
    UNRECORDED.pending = name
    while works:
        works.pop().wait()
    UNRECORDED.pending = ""


class LocalReduction:
    """The contributions of all ranks to this rank's shard, which this rank adds itself."""

    def __init__(
        self,
        rows: Sequence[Tensor],
        workspace_nbytes: int,
        arrive: Callable[[], None],
        on_read: Callable[[], None] = lambda: None,
    ) -> None:
        """Take contributions in rank order, which are complete after `arrive()`.

        `has_read()` is called after the last read: then their memory may be overwritten.
        """
        self.workspace_nbytes = workspace_nbytes
        self._rows, self._arrive, self._on_read = rows, arrive, on_read

    def wait(self) -> None:
        self._arrive()
        self._on_read()

    def finish(self, out: Tensor, scale: float, dtype: torch.dtype) -> None:
        """Add in rank order, in chunks that stay in the cache."""
        self._arrive()
        for start in range(0, len(out), SUM_CHUNK):
            chunk = slice(start, start + SUM_CHUNK)
            first, *others = (each[chunk] for each in self._rows)
            total = first.to(dtype)
            for each in others:
                total = total + each if total is first else total.add_(each)
            # `out` may be the memory of a contribution, so it is written after the last addition.
            torch.mul(total, scale, out=out[chunk])
        self._on_read()
