"""Collectives over gloo.

Note: why gloo's own reductions are not used. gloo reduces by an all-reduce of everything, in ring
order. Ranks that send each other what the other owns move half the bytes and add in rank order: the
result does not depend on which rank owns what, so every strategy gives the same bits.
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
    """Collectives on the CPU, overlapped by gloo's own threads."""

    def all_gather(self, buffers: Sequence[AllGatherInput]) -> Handle:
        """Send every rank's part to every other, in both directions at once unlike broadcasts."""
        works = []
        for each in buffers:
            source = self._own_span(each)
            if each.shard is not None:
                source.copy_(each.shard)
            targets = [each.full[part.start : part.stop] for part in each.spans]
            works += self._exchange([source] * self.size, targets, self.gather_group)
        return self._after(works, buffers[0].full, "all-gather")

    def reduce_scatter(self, whole: Tensor, parts: Sequence[Span]) -> Reduction:
        """Send every rank its part, and add what others send."""
        sent = [whole[part.start : part.stop] for part in parts]
        own = sent[self.rank]
        workspace = own.new_empty(self.size - 1, own.numel())
        rows = list(workspace)
        rows.insert(self.rank, own)
        works = self._exchange(sent, rows, self.reduce_group)
        return LocalReduction(rows, workspace.nbytes, self._wait(works, "reduce-scatter"))

    def _exchange(
        self, sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup
    ) -> list[dist.Work]:
        """Start to exchange a message with every other rank; empty ones are not sent."""
        others = [each for each in range(self.size) if each != self.rank]
        come, go = ([n for n in others if each[n].numel()] for each in (received, sent))
        works = [dist.irecv(received[n], group=group, group_src=n) for n in come]
        works += [dist.isend(sent[n], group=group, group_dst=n) for n in go]
        return [work for work in works if work is not None]

    def start_all_reduce(self, values: Tensor) -> Handle:
        work = dist.all_reduce(values, group=self.reduce_group, async_op=True)
        assert isinstance(work, dist.Work)
        return self._after([work], values, "all-reduce")

    def _after(self, works: list[dist.Work], result: Tensor, what: str) -> Handle:
        wait = self._wait(works, what)

        def finish() -> Tensor:
            wait()
            return result

        return Handle(finish)

    def _wait(self, works: list[dist.Work], what: str) -> Callable[[], None]:
        return partial(self.waits.around, partial(_wait_for, works, f"{what} over gloo"))


def _wait_for(works: list[dist.Work], what: str) -> None:
    UNRECORDED.pending = what
    while works:
        works.pop().wait()
    UNRECORDED.pending = ""


class LocalReduction:
    """The contributions of all ranks to this rank's part, which it adds itself."""

    def __init__(
        self,
        rows: Sequence[Tensor],
        workspace_nbytes: int,
        arrive: Callable[[], None],
        has_read: Callable[[], None] = lambda: None,
    ) -> None:
        """Take contributions in rank order, which are complete after `arrive()`.

        `has_read()` is called once they are not needed any more.
        """
        self.workspace_nbytes = workspace_nbytes
        self._rows, self._arrive, self._has_read = rows, arrive, has_read

    def wait(self) -> None:
        self._arrive()
        self._has_read()

    def finish(self, out: Tensor, scale: float, dtype: torch.dtype) -> None:
        """Add in rank order, in chunks that stay in the cache."""
        self._arrive()
        for start in range(0, len(out), SUM_CHUNK):
            chunk = slice(start, start + SUM_CHUNK)
            first, *others = (each[chunk] for each in self._rows)
            total = first.to(dtype)
            for each in others:
                total = total + each if total is first else total.add_(each)
            torch.mul(total, scale, out=out[chunk])  # last, since `out` may be one of them
        self._has_read()
