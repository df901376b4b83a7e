"""The position of each parameter in a unit's flat buffer, and the part that each rank owns.

    flat buffer   |  p0  |..|    p1     |.| p2 |....|      .. padding
    parts         |    rank 0    |    rank 1   |  rank 2  |
    shares        | repl 0 | ..1 | repl 0| ..1 |  ..      |     if replicas share master weights

Each parameter starts on a multiple of ALIGNMENT elements and every part begins and ends on one, so
that collectives and fused kernels always see 16-byte-aligned memory, at any number of ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, overload

ALIGNMENT = 64  # elements: 128 bytes in bf16, and no fused kernel's vector tail within a span


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The half-open range `[start, stop)` of elements."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def intersect(self, other: "Span") -> "Span | None":
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop) if start < stop else None

    def shift(self, offset: int) -> "Span":
        return Span(self.start + offset, self.stop + offset)

    def split(self, size: int) -> "Iterator[Span]":
        """Yield pieces of `size` elements, of which the last one may be shorter."""
        for start in range(self.start, self.stop, size):
            yield Span(start, min(start + size, self.stop))


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def aligned_chunk(span: Span, index: int, count: int) -> Span:
    """Return share `index` of `count` nearly equal shares, cut at multiples of ALIGNMENT."""
    step = round_up(-(-span.numel // count), ALIGNMENT)
    start = min(span.start + index * step, span.stop)
    return Span(start, min(start + step, span.stop))


@dataclass(frozen=True, slots=True)
class EvenSpans(Sequence[Span]):
    """`num_parts` spans of `size` elements, end to end, computed on access."""

    size: int
    num_spans: int

    def __len__(self) -> int:
        return self.num_spans

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Span]: ...
    def __getitem__(self, index: int | slice) -> Span | Sequence[Span]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self.num_spans))]
        place = index if 0 <= index < self.num_spans else range(self.num_spans)[index]
        return Span(place * self.size, (place + 1) * self.size)


def are_even(parts: Sequence[Span]) -> bool:
    """Return whether all parts have one size and are in the order of their ranks."""
    if isinstance(parts, EvenSpans):
        return True
    size = parts[0].numel
    return all(part == Span(i * size, (i + 1) * size) for i, part in enumerate(parts))


# The role of a parameter: matrices multiply, vectors are biases, weights of norms and alike of any
# number of dimensions, and others are embeddings, convolutions, routers or unknown.
Role = Literal["matrix", "vector", "other"]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """The properties of a parameter that the plan depends on."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    in_block: bool = field(default=False, compare=False)  # of a repeated block
    known_role: Role | None = None  # None: by its shape

    @property
    def role(self) -> Role:
        if self.known_role is not None:
            return self.known_role
        return "vector" if len(self.shape) <= 1 else "matrix"

    @property
    def numel(self) -> int:
        """The number of elements; 1 for a scalar."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ParamSpan:
    """A parameter and the span of the flat buffer that it fills."""

    param: ParamSpec
    span: Span


@dataclass(frozen=True, slots=True)
class ParamSlice:
    """The part of one parameter in some span of the flat buffer."""

    param: ParamSpec
    in_param: Span  # elements of the flattened parameter
    in_flat: Span  # the same elements, in the flat buffer


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """One flat buffer: its parameters, its padded length and the part each rank owns."""

    param_spans: tuple[ParamSpan, ...]
    numel: int
    shard_spans: Sequence[Span]  # of the ranks that share a replica
    shares_per_shard: int = 1  # of each part: one per replica, if replicas share master weights

    @property
    def owned_spans(self) -> Sequence[Span]:
        """The spans of master weights: the shares of rank 0's part, then of rank 1's, and on."""
        if self.shares_per_shard == 1:
            return self.shard_spans
        count = len(self.shard_spans) * self.shares_per_shard
        return EvenSpans(self.numel // count, count)

    def owned_span(self, rank: int, replica: int) -> Span:
        """Return the span whose master weights rank `rank` of a replica has."""
        return self.owned_spans[
            rank * self.shares_per_shard + (replica if self.shares_per_shard > 1 else 0)
        ]

    @property
    def replica_spans(self) -> EvenSpans:
        """The shares of the replicas, relative to an even part."""
        return EvenSpans(self.shard_spans[0].numel // self.shares_per_shard, self.shares_per_shard)

    @property
    def params(self) -> tuple[ParamSpec, ...]:
        return tuple(placement.param for placement in self.param_spans)

    @property
    def trainable(self) -> bool:
        """Whether the parameters are trained: all of them or none."""
        return self.param_spans[0].param.trainable

    @property
    def is_bytes(self) -> bool:
        """Whether the elements are bytes, which are codes of frozen weights."""
        return self.param_spans[0].param.dtype == "uint8"

    @property
    def is_even(self) -> bool:
        """Whether every rank owns the same number of elements."""
        return are_even(self.shard_spans)

    @property
    def padding(self) -> tuple[Span, ...]:
        """The elements that belong to no parameter; they are always zero."""
        gaps, end = [], 0
        for placement in self.param_spans:
            if placement.span.start > end:
                gaps.append(Span(end, placement.span.start))
            end = placement.span.stop
        return (*gaps, Span(end, self.numel)) if end < self.numel else tuple(gaps)

    def param_slices(self, within: Span) -> tuple[ParamSlice, ...]:
        """Return the non-empty parts of parameters within a span, in order."""
        found = []
        for placement in self.param_spans:
            both = placement.span.intersect(within)
            if both is not None:
                in_param = both.shift(-placement.span.start)
                found.append(ParamSlice(placement.param, in_param, both))
        return tuple(found)


def flat_layout(
    params: Sequence[ParamSpec], num_shards: int, shares_per_shard: int = 1
) -> FlatLayout:
    """Lay out `params` and cut the buffer evenly into `num_parts` parts of `shares` each.

    Vectors come last: weight decay doesn't apply to them and scalars, and elements treated alike by
    the optimizer should form long runs.
    """
    ordered = sorted(params, key=decay_group)
    placements, end = [], 0
    for param in ordered:
        start = round_up(end, ALIGNMENT)
        end = start + param.numel
        placements.append(ParamSpan(param, Span(start, end)))
    numel = round_up(end, ALIGNMENT * num_shards * shares_per_shard)
    return FlatLayout(
        tuple(placements), numel, EvenSpans(numel // num_shards, num_shards), shares_per_shard
    )


DECAY, NO_DECAY = 0, 1


def decay_group(param: ParamSpec) -> int:
    """Return the default group of a parameter: vectors don't decay."""
    return NO_DECAY if param.role == "vector" else DECAY


@dataclass(frozen=True, slots=True)
class OptimizerSpan:
    """A maximal span of parameters of one group; begins and ends on a multiple of 64."""

    span: Span
    group: int
    separate_param: ParamSpec | None = None  # the parameter that is a run of its own


def optimizer_spans(
    layout: FlatLayout,
    within: Span,
    group_of: Callable[[ParamSpec], int],
    is_separate: Callable[[ParamSpec], bool] = lambda param: False,
) -> tuple[OptimizerSpan, ...]:
    """Cut `within` wherever the group changes; padding belongs to the parameter before it.

    `within` must begin and end on a multiple of 64. A span without parameters has no run. A
    parameter that `is_alone` shares its run with no other.
    """
    runs: list[OptimizerSpan] = []
    for piece in layout.param_slices(within):
        group, alone = group_of(piece.param), piece.param if is_separate(piece.param) else None
        if runs and runs[-1].group == group and runs[-1].separate_param is None is alone:
            continue
        if runs:
            span = Span(runs[-1].span.start, piece.in_flat.start)
            runs[-1] = OptimizerSpan(span, runs[-1].group, runs[-1].separate_param)
        runs.append(OptimizerSpan(Span(piece.in_flat.start, within.stop), group, alone))
    return tuple(runs)
