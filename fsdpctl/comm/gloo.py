"""Collectives over gloo.

Note: why gloo's own reductions are not used among few ranks. gloo reduces by an all-reduce of
everything, in ring order, and needs the gradients in one buffer. Ranks that send each other what
the other owns move half the bytes, send from where autograd made the gradients and in the dtype
they have, and add in rank order: the result does not depend on which rank owns what, so every
strategy gives the same bits.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fsdpctl.comm.base import Gathering, Handle, Reduction, Stretches
from fsdpctl.comm.contributions import Contributions, within
from fsdpctl.comm.process_group import (
    ProcessGroupCollectives,
    all_gather_single,
    reduce_scatter_single,
)
from fsdpctl.plan.layout import Span, are_even
from fsdpctl.plan.transport import (
    ALL_REDUCED_TOGETHER,
    MAX_DIRECT_RANKS,
    Transport,
    adds_whole,
    reduce_workspace,
    sends_in_place,
)


class GlooCollectives(ProcessGroupCollectives):
    """Collectives on the CPU, overlapped by gloo's own threads."""

    exchanges = False  # among few ranks all stretches are; gloo adds in the dtype it is given

    def __init__(self, groups: Sequence[Sequence[int]] | None = None) -> None:
        """Join the ranks of one of `groups`, which together are all ranks; None: all ranks."""
        super().__init__(groups)
        self._to_add: list[tuple[Tensor, list[dist.Work]]] = []

    def all_gather(self, whole: Tensor, parts: Sequence[Span], shard: Tensor | None) -> Handle:
        """By messages from rank to rank, or among many by gloo's all-gather."""
        return self.gather_together([Gathering(whole, parts, shard)])

    def gather_together(self, buffers: Sequence[Gathering]) -> Handle:
        """One after the other, waited for at once."""
        works = [work for each in buffers for work in self._start_gather(each)]
        return self._after(works, buffers[0].whole)

    def _start_gather(self, buffer: Gathering) -> list[dist.Work]:
        whole, own = buffer.whole, buffer.parts[self.rank]
        if buffer.shard is not None:
            whole[own.start : own.stop].copy_(buffer.shard)
        source = whole[own.start : own.stop]
        if self.size <= MAX_DIRECT_RANKS:
            return self._exchange_parts(whole, buffer.parts, source)
        if are_even(buffer.parts):
            return [all_gather_single(whole, source, group=self.gather_group, async_op=True)]
        return self.start_broadcasts(whole, buffer.parts)

    def _exchange_parts(
        self, whole: Tensor, parts: Sequence[Span], source: Tensor
    ) -> list[dist.Work]:
        """Every rank's part to every other; both ways at once, which broadcasts are not."""
        works = [
            dist.irecv(whole[part.start : part.stop], group=self.gather_group, group_src=each)
            for each, part in enumerate(parts)
            if each != self.rank and part.numel
        ]
        if source.numel():
            works += [
                dist.isend(source, group=self.gather_group, group_dst=each)
                for each in range(self.size)
                if each != self.rank
            ]
        return [work for work in works if work is not None]

    def sends_in_place(self, parts: Sequence[Span]) -> bool:
        """Where ranks send each other what the other owns."""
        return sends_in_place(Transport.GLOO, parts)

    @property
    def adds_whole(self) -> bool:
        """Between two ranks."""
        return adds_whole(Transport.GLOO, self.size)

    def reduce_scatter(
        self, gradients: Stretches, parts: Sequence[Span], dtype: torch.dtype
    ) -> Reduction:
        """By messages from rank to rank; among many by gloo's reduce-scatter."""
        _, first = gradients[0]
        workspace = first.new_empty(reduce_workspace(Transport.GLOO, parts, self.rank))
        own = parts[self.rank]
        if self.sends_in_place(parts):
            received = workspace.view(self.size - 1, own.numel)
            rows: list[Tensor | None] = list(received.unbind())
            rows.insert(self.rank, None)
            works = self._receive(rows, gradients, own) + self._send(gradients, parts)
            return Contributions(gradients, own, rows, self._wait(works))
        ((_, whole),) = gradients
        work = reduce_scatter_single(workspace, whole, group=self.reduce_group, async_op=True)
        assert isinstance(work, dist.Work)
        return Contributions(gradients, own, [workspace], self._wait([work]))

    def _receive(
        self, rows: Sequence[Tensor | None], gradients: Stretches, own: Span
    ) -> list[dist.Work]:
        works = []
        for source, row in enumerate(rows):
            for span, _ in gradients if row is not None else ():
                both = span.intersect(own)
                if both is not None:
                    target = within(row, own, both)
                    works.append(dist.irecv(target, group=self.reduce_group, group_src=source))
        return [work for work in works if work is not None]

    def _send(self, gradients: Stretches, parts: Sequence[Span]) -> list[dist.Work]:
        works = []
        for target, part in enumerate(parts):
            for span, values in gradients if target != self.rank else ():
                both = span.intersect(part)
                if both is not None:
                    sent = within(values, span, both)
                    works.append(dist.isend(sent, group=self.reduce_group, group_dst=target))
        return [work for work in works if work is not None]

    def _wait(self, works: list[dist.Work]) -> Callable[[], None]:
        return partial(self.waits.around, partial(_wait_for, works))

    def _after(self, works: list[dist.Work], result: Tensor) -> Handle:
        wait = self._wait(works)

        def finish() -> Tensor:
            wait()
            return result

        return Handle(finish)

    def start_all_reduce(self, values: Tensor, *, at_once: bool = True) -> Handle:
        """By gloo's all-reduce, in the order of the calls.

        Its threads take the cores from what computes. That costs less in a few long stretches.
        """
        works: list[dist.Work] = []
        self._to_add.append((values, works))
        if at_once or sum(each.nbytes for each, _ in self._to_add) >= ALL_REDUCED_TOGETHER:
            self._add_all()

        added = self._after(works, values)

        def finish() -> Tensor:
            if not works:
                self._add_all()
            return added.wait()

        return Handle(finish)

    def _add_all(self) -> None:
        while self._to_add:
            values, works = self._to_add.pop(0)
            works.append(dist.all_reduce(values, group=self.reduce_group, async_op=True))


def _wait_for(works: list[dist.Work]) -> None:
    while works:
        works.pop().wait()
