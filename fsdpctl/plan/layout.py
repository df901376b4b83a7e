"""Where each parameter lies in a unit's flat buffer, and which part of it each rank owns.

    flat buffer   |  p0  |..|    p1     |.| p2 |....|      .. padding
    parts         |    rank 0    |    rank 1   |  rank 2  |
    shares        | copy 0 | ..1 | copy 0| ..1 |  ..      |     where masters are cut over copies

Each parameter starts on a multiple of ALIGNMENT elements and every part begins and ends on one, so
that collectives and fused kernels always see 16-byte-aligned memory, at any number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import overload

ALIGNMENT = 64  # elements: 128 bytes in bf16, and no fused kernel's vector tail within a span


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The half-open range `[start, stop)` of elements."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """How many elements it covers."""
        return self.stop - self.start

    def intersect(self, other: "Span") -> "Span | None":
        """What both cover, or None."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop) if start < stop else None

    def shift(self, offset: int) -> "Span":
        """The same length, `offset` elements further on."""
        return Span(self.start + offset, self.stop + offset)


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def share_of(span: Span, index: int, count: int) -> Span:
    """The `index`-th of `count` nearly equal shares of `span`, cut at multiples of ALIGNMENT."""
    step = round_up(-(-span.numel // count), ALIGNMENT)
    start = min(span.start + index * step, span.stop)
    return Span(start, min(start + step, span.stop))


@dataclass(frozen=True, slots=True)
class EvenParts(Sequence[Span]):
    """`num_parts` spans of `size` elements, end to end; costs nothing however many they are."""

    size: int
    num_parts: int

    def __len__(self) -> int:
        """How many there are."""
        return self.num_parts

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Span]: ...
    def __getitem__(self, index: int | slice) -> Span | Sequence[Span]:
        """The span of one rank, or of several."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self.num_parts))]
        place = index if 0 <= index < self.num_parts else range(self.num_parts)[index]
        return Span(place * self.size, (place + 1) * self.size)


def are_even(parts: Sequence[Span]) -> bool:
    """Whether all parts have one size and lie in the order of their ranks."""
    if isinstance(parts, EvenParts):
        return True
    size = parts[0].numel
    return all(part == Span(i * size, (i + 1) * size) for i, part in enumerate(parts))


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What the plan needs to know of one parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True

    @property
    def numel(self) -> int:
        """How many elements it has; 1 for a scalar."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Placement:
    """A parameter and the span of the flat buffer that it fills."""

    param: ParamSpec
    span: Span


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter that lies in some span of the flat buffer."""

    param: ParamSpec
    in_param: Span  # elements of the flattened parameter
    in_flat: Span  # the same elements, in the flat buffer


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """One flat buffer: its parameters, its padded length and the part each rank owns."""

    placements: tuple[Placement, ...]
    numel: int
    parts: Sequence[Span]  # of the ranks that share a copy
    shares: int = 1  # of each part: one for each copy, where masters are cut over copies

    @property
    def owned_parts(self) -> Sequence[Span]:
        """What each rank has the masters of: the shares of rank 0's part, then of rank 1's, .."""
        if self.shares == 1:
            return self.parts
        count = len(self.parts) * self.shares
        return EvenParts(self.numel // count, count)

    def owned(self, rank: int, copy: int) -> Span:
        """What the `rank`-th rank of the `copy`-th copy has the masters of."""
        return self.owned_parts[rank * self.shares + (copy if self.shares > 1 else 0)]

    @property
    def shares_of_part(self) -> EvenParts:
        """Where in an even part the shares of the copies lie."""
        return EvenParts(self.parts[0].numel // self.shares, self.shares)

    @property
    def params(self) -> tuple[ParamSpec, ...]:
        """The parameters in the order they lie in."""
        return tuple(placement.param for placement in self.placements)

    @property
    def trainable(self) -> bool:
        """Whether its parameters are trained: all are, or none."""
        return self.placements[0].param.trainable

    @property
    def is_even(self) -> bool:
        """Whether every rank owns as much."""
        return are_even(self.parts)

    @property
    def padding(self) -> tuple[Span, ...]:
        """The elements that belong to no parameter; they are always zero."""
        gaps, end = [], 0
        for placement in self.placements:
            if placement.span.start > end:
                gaps.append(Span(end, placement.span.start))
            end = placement.span.stop
        return (*gaps, Span(end, self.numel)) if end < self.numel else tuple(gaps)

    def pieces(self, within: Span) -> tuple[Piece, ...]:
        """The parts of parameters that lie in `within`, in order; empty ones are left out."""
        found = []
        for placement in self.placements:
            both = placement.span.intersect(within)
            if both is not None:
                in_param = both.shift(-placement.span.start)
                found.append(Piece(placement.param, in_param, both))
        return tuple(found)


def flat_layout(params: Sequence[ParamSpec], num_parts: int, shares: int = 1) -> FlatLayout:
    """Lay out `params` and cut the buffer evenly into `num_parts` parts of `shares` each.

    Matrices come first: weight decay applies to them and not to vectors and scalars, and elements
    treated alike by the optimizer should form long runs.
    """
    ordered = sorted(params, key=lambda param: len(param.shape) <= 1)
    placements, end = [], 0
    for param in ordered:
        start = round_up(end, ALIGNMENT)
        end = start + param.numel
        placements.append(Placement(param, Span(start, end)))
    numel = round_up(end, ALIGNMENT * num_parts * shares)
    return FlatLayout(tuple(placements), numel, EvenParts(numel // num_parts, num_parts), shares)
