"""The transport of gradients over a backend, their sizes, and how many may be in flight."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from fsdpctl.plan.layout import FlatLayout, Span, share_of

ADDED_AT_A_TIME = 1 << 17  # elements, scaled while they are in the cache


class Transport(StrEnum):
    """A communication backend."""

    GLOO = "gloo"
    NCCL = "nccl"
    SHARED = "shared"  # memory of one machine


def reduce_workspace(transport: Transport, parts: Sequence[Span], rank: int) -> int:
    """Return the elements that a reduce-scatter allocates on `rank`: what others send over gloo."""
    return parts[rank].numel * (len(parts) - 1) if transport is Transport.GLOO else 0


Itemsize = Callable[[FlatLayout], int]  # bytes of one element of a flat buffer


@dataclass(frozen=True, slots=True)
class Reductions:
    """The plan of all gradient reductions."""

    nbytes: Mapping[str, int]  # of every unit's gradients, in the reduced dtype
    budget: int  # bytes that may be in flight before a reduction is waited for
    stays: bool = False  # whether a first sum stays in the buffer of its reduction
    # For units larger than every block: the number of pieces in which the gradients of one backward
    # are collected and reduced. Held gradients are collected already.
    pieces: Mapping[str, int] = field(default_factory=dict)
    # The number of ranks among which a sum is split, if its sum over replicas follows at once; 0:
    # if that follows once the reduction has been waited for.
    chained: int = 0
    combines: bool = False  # whether a second collective follows each reduction

    @property
    def most_in_flight(self) -> int:
        """The bytes of the reductions that may be in flight at once."""
        return max(self.budget, *self.nbytes.values())

    def pieces_of(self, unit: str, *, was_held: bool) -> int:
        """Return the number of reductions of a unit's gradients."""
        return 1 if was_held else self.pieces.get(unit, 1)

    def fits(self, nbytes: int, others: Iterable[int], *, is_first: bool = False) -> bool:
        """Return whether a reduction may be in flight together with `others`, all in bytes.

        `is_first`: no earlier gradient exists to add to, so a sum that stays costs nothing.
        """
        if self.stays and is_first:
            return True
        sizes = list(others)
        return not sizes or sum(sizes, nbytes) <= self.budget


def share_of_parts(layout: FlatLayout, piece: int, pieces: int) -> Span:
    """Return the elements of each rank's part that piece `piece` reduces; may be empty."""
    return share_of(Span(0, layout.owned_parts[0].numel), piece, pieces)


def num_pieces(layouts: Sequence[FlatLayout], asked: int) -> int:
    """Return how many of `asked` pieces are not empty."""
    return max(
        sum(share_of_parts(layout, piece, asked).numel > 0 for piece in range(asked))
        for layout in layouts
    )
