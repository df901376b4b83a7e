"""How many gradients may be on their way at a time, and how large they are."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fsdpctl.plan.layout import FlatLayout, Span, share_of

Itemsize = Callable[[FlatLayout], int]  # bytes of one element of a flat buffer


@dataclass(frozen=True, slots=True)
class Reductions:
    """How gradients are reduced."""

    nbytes: Mapping[str, int]  # of every unit's gradients, as they are reduced
    budget: int  # how many bytes may be on their way before one reduction is waited for
    stays: bool = False  # whether a first sum stays in the buffer that it was added in
    # Of units that are larger than every block: in how many pieces the gradients of one backward
    # are collected and reduced. What was held back is collected already.
    pieces: Mapping[str, int] = field(default_factory=dict)
    # Among how many ranks a sum is split that is added over copies at once; 0: when a reduction has
    # been waited for.
    chained: int = 0

    def pieces_of(self, unit: str, *, was_held: bool) -> int:
        """How many reductions a unit's gradients take."""
        return 1 if was_held else self.pieces.get(unit, 1)

    def piece_nbytes(self, unit: str, *, was_held: bool) -> int:
        """Bytes of each of them."""
        return -(-self.nbytes[unit] // self.pieces_of(unit, was_held=was_held))

    def combined_nbytes(self, nbytes: int) -> int:
        """What the collective after a reduction of so many bytes counts as."""
        return nbytes // self.chained if self.chained else nbytes

    def fits(self, nbytes: int, others: Iterable[int], *, is_first: bool = False) -> bool:
        """Whether a reduction may be on its way together with `others`, all in bytes.

        `is_first` says that there is no earlier gradient to add to: a sum that stays costs nothing.
        """
        if self.stays and is_first:
            return True
        sizes = list(others)
        return not sizes or sum(sizes, nbytes) <= self.budget


def share_of_parts(layout: FlatLayout, piece: int, pieces: int) -> Span:
    """Which elements of what every rank owns are reduced together; may be empty."""
    return share_of(Span(0, layout.owned_parts[0].numel), piece, pieces)


def _num_pieces(layouts: Sequence[FlatLayout], asked: int) -> int:
    """How many of `asked` pieces have something in them."""
    return max(
        sum(share_of_parts(layout, piece, asked).numel > 0 for piece in range(asked))
        for layout in layouts
    )


def plan_reductions(
    layouts: Mapping[str, Sequence[FlatLayout]],
    itemsize: Itemsize,
    *,
    stays: bool = False,
    blocks: Collection[str] = (),
    chained: int = 0,
) -> Reductions:
    """Let as much be on its way as the largest unit has, or twice that where it has two bytes each.

    Two reductions of two bytes an element cost what one of four does. The order of collectives
    follows from this, so it depends on nothing that differs between ranks.

    Args:
        layouts: of every unit.
        itemsize: bytes of one element, as it is reduced.
        stays: whether a first sum stays in the buffer that it was added in.
        blocks: where gradients are collected first, the units of which the largest counts; larger
            ones, as a rule embedding and head, are reduced in pieces of its size.
        chained: as in `Reductions`.
    """
    trained = {
        name: [layout for layout in of_unit if layout.trainable]
        for name, of_unit in layouts.items()
    }
    nbytes = {
        name: sum(layout.numel * itemsize(layout) for layout in of_unit)
        for name, of_unit in trained.items()
    }
    widest = max((itemsize(each) for of_unit in trained.values() for each in of_unit), default=4)
    largest = max((nbytes[name] for name in blocks), default=0) or max(nbytes.values())
    pieces = {
        name: _num_pieces(trained[name], -(-size // largest))
        for name, size in nbytes.items()
        if size > largest
    }
    return Reductions(nbytes, largest * (1 if widest > 2 else 2), stays, pieces, chained)
