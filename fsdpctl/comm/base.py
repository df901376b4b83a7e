"""The collectives that the engine needs, over any process group or none."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fsdpctl.comm.waits import HostWaits, Waits
from fsdpctl.plan.layout import Span

# Gradients in some order: the elements of a flat buffer that each has, and their values.
Stretches = Sequence[tuple[Span, Tensor]]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Gathering:
    """One buffer of an all-gather; see `Collectives.all_gather`."""

    whole: Tensor
    parts: Sequence[Span]
    shard: Tensor | None


class Handle:
    """A started collective. `wait()` returns its result, once; until then it is in flight."""

    __slots__ = ("_finish",)

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish = finish

    def wait(self) -> Tensor:
        """The result, safe to use on the current stream."""
        return self._finish()


class Reduction(Protocol):
    """A started reduction; until `finish` or `wait` it owns the gradients it was given."""

    workspace_nbytes: int  # allocated for it

    def finish(self, out: Tensor, scale: float, dtype: torch.dtype) -> None:
        """Wait, and write this rank's part of the sum times `scale` to `out`.

        `out` may be this rank's part of the buffer that was given. What lies in no stretch is
        zero. `dtype` is what is added in, where this rank adds.
        """
        ...

    def wait(self) -> None:
        """Wait, and forget the result."""
        ...


class Collectives(Protocol):
    """One set of ranks, and what they can do together. Sums, never means, go over the wire."""

    rank: int
    size: int
    waits: Waits

    def separate_reductions(self) -> None:
        """From now on reductions run beside gathers. Collective."""
        ...

    def all_gather(self, whole: Tensor, parts: Sequence[Span], shard: Tensor | None) -> Handle:
        """Fill every rank's part of `whole` in place from that rank; the result is `whole`.

        This rank's part is first copied (and cast) from `shard`, unless that is None.
        """
        ...

    def gather_together(self, buffers: Sequence[Gathering]) -> Handle:
        """The same of several buffers as one collective; the result is the first one's `whole`."""
        ...

    def sends_in_place(self, parts: Sequence[Span]) -> bool:
        """Whether `reduce_scatter` takes gradients as they are; else one stretch has all."""
        ...

    @property
    def exchanges(self) -> bool:
        """Whether `reduce_scatter` takes one stretch in another dtype than it adds in."""
        ...

    @property
    def adds_whole(self) -> bool:
        """Whether whole gradients are better added by `start_all_reduce`."""
        ...

    def reduce_scatter(
        self, gradients: Stretches, parts: Sequence[Span], dtype: torch.dtype
    ) -> Reduction:
        """Start to add up the ranks' gradients in `dtype`, of which each gets its part.

        The stretches are alike on every rank, spans and dtypes.
        """
        ...

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum `values` over the ranks in place, and return them."""
        ...

    def start_all_reduce(self, values: Tensor, *, at_once: bool = True) -> Handle:
        """The same, in the background; `values` belong to it until the handle was waited for.

        Without `at_once` it may be kept back until there is more to add, or somebody waits.
        """
        ...

    def broadcast(self, values: Tensor, source: int = 0) -> Tensor:
        """Overwrite `values` with those of rank `source`, and return them."""
        ...

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's `value`, in rank order, on every rank: plain, or a dataclass of such."""
        ...

    def barrier(self) -> None:
        """Return once every rank has arrived."""
        ...


class LocalCollectives:
    """One rank alone: nothing to send, nothing to copy."""

    rank = 0
    size = 1
    waits: Waits = HostWaits()

    def separate_reductions(self) -> None:
        """They take no time."""

    def all_gather(self, whole: Tensor, parts: Sequence[Span], shard: Tensor | None) -> Handle:
        """`whole`, with `shard` written to it."""
        return self.gather_together([Gathering(whole, parts, shard)])

    def gather_together(self, buffers: Sequence[Gathering]) -> Handle:
        """Each of them."""
        for each in buffers:
            own = each.parts[0]
            if each.shard is not None:
                each.whole[own.start : own.stop].copy_(each.shard)
        return Handle(lambda: buffers[0].whole)

    def sends_in_place(self, parts: Sequence[Span]) -> bool:
        """Nothing is sent."""
        return False

    exchanges = False

    @property
    def adds_whole(self) -> bool:
        """One rank has nothing to add."""
        return False

    def reduce_scatter(
        self, gradients: Stretches, parts: Sequence[Span], dtype: torch.dtype
    ) -> Reduction:
        """The only rank's part is everything."""
        ((_, whole),) = gradients
        return InPlace(Handle(lambda: whole))

    def all_reduce(self, values: Tensor) -> Tensor:
        """`values`."""
        return values

    def start_all_reduce(self, values: Tensor, *, at_once: bool = True) -> Handle:
        """`values`."""
        return Handle(lambda: values)

    def broadcast(self, values: Tensor, source: int = 0) -> Tensor:
        """`values`."""
        return values

    def gather_objects(self, value: T) -> list[T]:
        """`value` alone."""
        return [value]

    def barrier(self) -> None:
        """Nobody to wait for."""


class InPlace:
    """A reduction whose result lies in the buffer that was given."""

    workspace_nbytes = 0

    def __init__(self, handle: Handle) -> None:
        """`handle` gives the result."""
        self._handle = handle

    def finish(self, out: Tensor, scale: float, dtype: torch.dtype) -> None:
        """In one pass where the dtypes are equal."""
        total = self._handle.wait()
        if scale == 1 and out.data_ptr() == total.data_ptr():
            return
        if out.dtype == total.dtype:
            torch.mul(total, scale, out=out)
        else:
            out.copy_(total).mul_(scale)

    def wait(self) -> None:
        """Until it has ended."""
        self._handle.wait()
