"""Collectives over gloo.

Note: why gloo's own reductions are not used among few ranks. gloo reduces by an all-reduce of
everything, in ring order, and needs the gradients in one buffer. Ranks that send each other what
the other owns move half the bytes, send from where autograd made the gradients and in their dtype,
and add in rank order: the result does not depend on which rank owns what, so every strategy gives
the same bits.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fsdpctl.comm.base import Gathering, Handle, Reduction, Stretches
from fsdpctl.comm.process_group import (
    ProcessGroupCollectives,
    all_gather_single,
    reduce_scatter_single,
)
from fsdpctl.plan.layout import Span, are_even
from fsdpctl.plan.reductions import (
    ADDED_AT_A_TIME,
    MAX_DIRECT_RANKS,
    sends_in_place,
)


class GlooCollectives(ProcessGroupCollectives):
    """Collectives on the CPU, overlapped by gloo's own threads."""

    def all_gather(self, buffers: Sequence[Gathering]) -> Handle:
        """Exchange messages between ranks, or among many ranks use gloo's all-gather."""
        works = [work for each in buffers for work in self._start_gather(each)]
        return self._after(works, buffers[0].whole)

    def _start_gather(self, buffer: Gathering) -> list[dist.Work]:
        source = self._own(buffer)
        if buffer.shard is not None:
            source.copy_(buffer.shard)
        if self.size <= MAX_DIRECT_RANKS:
            return self._exchange_parts(buffer, source)
        if are_even(buffer.parts):
            return [all_gather_single(buffer.whole, source, group=self.gather_group, async_op=True)]
        return self.start_broadcasts(buffer.whole, buffer.parts)

    def _exchange_parts(self, buffer: Gathering, source: Tensor) -> list[dist.Work]:
        """Send every rank's part to every other, in both directions at once unlike broadcasts."""
        group = self.gather_group
        works = [
            dist.irecv(buffer.whole[part.start : part.stop], group=group, group_src=each)
            for each, part in enumerate(buffer.parts)
            if each != self.rank and part.numel
        ]
        if source.numel():
            others = (each for each in range(self.size) if each != self.rank)
            works += [dist.isend(source, group=group, group_dst=each) for each in others]
        return [work for work in works if work is not None]

    def reduce_scatter(
        self, gradients: Stretches, parts: Sequence[Span], dtype: torch.dtype
    ) -> Reduction:
        """Exchange messages between ranks, or among many ranks use gloo's reduce-scatter."""
        _, first = gradients[0]
        own, direct = parts[self.rank], sends_in_place(self.transport, parts)
        workspace = first.new_empty(own.numel * (self.size - 1 if direct else 1))
        if direct:
            received = workspace.view(self.size - 1, own.numel)
            rows: list[Tensor | None] = list(received.unbind())
            rows.insert(self.rank, None)
            works = self._receive(rows, gradients, own) + self._send(gradients, parts)
            return LocalReduction(gradients, own, rows, self._wait(works))
        ((_, whole),) = gradients
        work = reduce_scatter_single(workspace, whole, group=self.reduce_group, async_op=True)
        assert isinstance(work, dist.Work)
        return LocalReduction(gradients, own, [workspace], self._wait([work]))

    def _receive(
        self, rows: Sequence[Tensor | None], gradients: Stretches, own: Span
    ) -> list[dist.Work]:
        works = []
        for source, row in enumerate(rows):
            for span, _ in gradients if row is not None else ():
                both = span.intersect(own)
                if both is not None:
                    target = _within(row, own, both)
                    works.append(dist.irecv(target, group=self.reduce_group, group_src=source))
        return [work for work in works if work is not None]

    def _send(self, gradients: Stretches, parts: Sequence[Span]) -> list[dist.Work]:
        works = []
        for target, part in enumerate(parts):
            for span, values in gradients if target != self.rank else ():
                both = span.intersect(part)
                if both is not None:
                    sent = _within(values, span, both)
                    works.append(dist.isend(sent, group=self.reduce_group, group_dst=target))
        return [work for work in works if work is not None]

    def start_all_reduce(self, values: Tensor) -> Handle:
        """Start gloo's all-reduce."""
        work = dist.all_reduce(values, group=self.reduce_group, async_op=True)
        assert isinstance(work, dist.Work)
        return self._after([work], values)

    def _after(self, works: list[dist.Work], result: Tensor) -> Handle:
        wait = self._wait(works)

        def finish() -> Tensor:
            wait()
            return result

        return Handle(finish)

    def _wait(self, works: list[dist.Work]) -> Callable[[], None]:
        return partial(self.waits.around, partial(_wait_for, works))


def _wait_for(works: list[dist.Work]) -> None:
    while works:
        works.pop().wait()


class LocalReduction:
    """The contributions of all ranks to this rank's part, which it adds itself."""

    def __init__(
        self,
        gradients: Stretches,
        own: Span,
        rows: Sequence[Tensor | None],
        wait: Callable[[], None],
    ) -> None:
        """Take contributions in rank order: `rows`, in which None is this rank's, in `gradients`.

        They are complete after `wait()`.
        """
        self.workspace_nbytes = sum(row.nbytes for row in rows if row is not None)
        self._gradients = gradients
        self._own = own
        self._rows = rows
        self.wait = wait

    def finish(self, out: Tensor, scale: float, dtype: torch.dtype) -> None:
        """Add in rank order, in chunks that stay in the cache."""
        self.wait()
        end = self._own.start
        for span, values in self._gradients:
            both = span.intersect(self._own)
            if both is not None:
                out[end - self._own.start : both.start - self._own.start].zero_()
                end = both.stop
                contributions = [
                    _within(values, span, both) if row is None else _within(row, self._own, both)
                    for row in self._rows
                ]
                _add(contributions, _within(out, self._own, both), scale, dtype)
        out[end - self._own.start :].zero_()


def _within(values: Tensor | None, span: Span, wanted: Span) -> Tensor:
    """Return the elements `wanted` of `values`, which covers `span`."""
    assert values is not None
    return values[wanted.start - span.start : wanted.stop - span.start]


def _add(contributions: Sequence[Tensor], out: Tensor, scale: float, dtype: torch.dtype) -> None:
    for start in range(0, len(out), ADDED_AT_A_TIME):
        chunk = slice(start, start + ADDED_AT_A_TIME)
        first, *others = (each[chunk] for each in contributions)
        total = first.to(dtype)
        for each in others:
            total = total + each if total is first else total.add_(each)
        torch.mul(total, scale, out=out[chunk])  # last, since `out` may be one of them
