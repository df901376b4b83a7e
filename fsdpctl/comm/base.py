"""The collectives that the engine needs, over any process group or none."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from fsdpctl.plan.layout import Span


class Handle:
    """A started collective. `wait()` returns its result, once; until then it is in flight."""

    __slots__ = ("_finish", "workspace_nbytes")

    def __init__(self, finish: Callable[[], Tensor], workspace_nbytes: int = 0) -> None:
        self._finish = finish
        self.workspace_nbytes = workspace_nbytes  # allocated for it, besides what it was given

    def wait(self) -> Tensor:
        """The result, safe to use on the current stream."""
        return self._finish()


class Collectives(Protocol):
    """One set of ranks, and what they can do together. Sums, never means, go over the wire."""

    rank: int
    size: int

    def all_gather(self, whole: Tensor, parts: Sequence[Span], shard: Tensor | None) -> Handle:
        """Fill every rank's part of `whole` in place from that rank; the result is `whole`.

        This rank's part is first copied (and cast) from `shard`, unless that is None.
        """
        ...

    def reduce_scatter(self, whole: Tensor, parts: Sequence[Span]) -> Handle:
        """The sum over the ranks of their `whole`, of which this rank gets its part.

        `whole` belongs to the collective. The result may be a window into it, or into the
        collective's workspace.
        """
        ...

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum `values` over the ranks in place, and return them."""
        ...

    def start_all_reduce(self, values: Tensor) -> Handle:
        """The same, in the background; `values` belong to it until the handle was waited for."""
        ...

    def broadcast(self, values: Tensor, source: int = 0) -> Tensor:
        """Overwrite `values` with those of rank `source`, and return them."""
        ...

    def gather_objects(self, value: object) -> list[object]:
        """Every rank's `value`, in rank order, on every rank."""
        ...

    def barrier(self) -> None:
        """Return once every rank has arrived."""
        ...


class LocalCollectives:
    """One rank alone: nothing to send, nothing to copy."""

    rank = 0
    size = 1

    def all_gather(self, whole: Tensor, parts: Sequence[Span], shard: Tensor | None) -> Handle:
        """`whole`, with `shard` written to it."""
        if shard is not None:
            whole[parts[0].start : parts[0].stop].copy_(shard)
        return Handle(lambda: whole)

    def reduce_scatter(self, whole: Tensor, parts: Sequence[Span]) -> Handle:
        """`whole` itself: the only rank's part is everything."""
        return Handle(lambda: whole)

    def all_reduce(self, values: Tensor) -> Tensor:
        """`values`."""
        return values

    def start_all_reduce(self, values: Tensor) -> Handle:
        """`values`."""
        return Handle(lambda: values)

    def broadcast(self, values: Tensor, source: int = 0) -> Tensor:
        """`values`."""
        return values

    def gather_objects(self, value: object) -> list[object]:
        """`value` alone."""
        return [value]

    def barrier(self) -> None:
        """Nobody to wait for."""
