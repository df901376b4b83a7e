"""Sums that the owner of a part adds up itself, from what every rank sent it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fsdpctl.comm.base import Stretches
from fsdpctl.plan.layout import Span
from fsdpctl.plan.transport import ADDED_AT_A_TIME


class Contributions:
    """What each rank contributes to this rank's part, on its way."""

    def __init__(
        self,
        gradients: Stretches,
        own: Span,
        rows: Sequence[Tensor | None],
        wait: Callable[[], None],
    ) -> None:
        """`rows` are the contributions in rank order; None is this rank's, in `gradients`."""
        self.workspace_nbytes = sum(row.nbytes for row in rows if row is not None)
        self._gradients = gradients
        self._own = own
        self._rows = rows
        self.wait = wait

    def finish(self, out: Tensor, scale: float, dtype: torch.dtype) -> None:
        """Add in rank order, a chunk that stays in the cache at a time."""
        self.wait()
        end = self._own.start
        for span, values in self._gradients:
            both = span.intersect(self._own)
            if both is not None:
                out[end - self._own.start : both.start - self._own.start].zero_()
                end = both.stop
                contributions = [
                    within(values, span, both) if row is None else within(row, self._own, both)
                    for row in self._rows
                ]
                into = within(out, self._own, both)
                _add_up(contributions, into, scale, dtype)
        out[end - self._own.start :].zero_()


class Received:
    """Contributions in one tensor, (ranks, elements), which one kernel adds up.

    The kernel accumulates in fp32 at least, in an order that depends on the number of ranks alone.
    """

    def __init__(self, sent: Tensor, rows: Tensor, wait: Callable[[], None]) -> None:
        """`rows` are what arrives; `sent` must live as long as that is under way."""
        self.workspace_nbytes = rows.nbytes
        self._sent, self._rows = sent, rows
        self.wait = wait

    def finish(self, out: Tensor, scale: float, dtype: torch.dtype) -> None:
        """Add into `out`, without a copy in `dtype` if that differs."""
        self.wait()
        torch.sum(self._rows, 0, dtype=out.dtype, out=out)
        out.mul_(scale)


def within(values: Tensor | None, span: Span, wanted: Span) -> Tensor:
    """The elements `wanted` in `values`, which has `span`."""
    assert values is not None
    return values[wanted.start - span.start : wanted.stop - span.start]


def _add_up(contributions: Sequence[Tensor], out: Tensor, scale: float, dtype: torch.dtype) -> None:
    for start in range(0, len(out), ADDED_AT_A_TIME):
        chunk = slice(start, start + ADDED_AT_A_TIME)
        first, *others = (each[chunk] for each in contributions)
        total = first.to(dtype)
        for each in others:
            total = total + each if total is first else total.add_(each)
        torch.mul(total, scale, out=out[chunk])  # last, since `out` may be one of them
