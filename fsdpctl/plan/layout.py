"""The position of each parameter in a unit's flat buffer, and the shard that each rank stores.

    flat buffer   |  p0  |..|    p1     |.| p2 |....|      .. padding
    shards        |    rank 0    |    rank 1   |  rank 2  |
    shares        | repl 0 | ..1 | repl 0| ..1 |  ..      |     if replicas share master weights

Each parameter starts on a multiple of ALIGNMENT elements, and each shard starts and ends on such a
multiple, at any number of ranks: collectives require 16 bytes, and ALIGNMENT has another reason.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, overload

# In elements: 128 bytes in bf16. Fused CPU kernels round the tail of a vector differently from its
# body, so a span that ended elsewhere would make results depend on the number of ranks.
ALIGNMENT = 64


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
    """Return chunk `index` of `count`, of an aligned size; the last may be short or empty."""
    step = round_up(-(-span.numel // count), ALIGNMENT)
    start = min(span.start + index * step, span.stop)
    return Span(start, min(start + step, span.stop))


@dataclass(frozen=True, slots=True)
class EvenSpans(Sequence[Span]):
    """A sequence of `num_spans` adjacent spans of `size` elements, computed on access."""

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
            return [self[i] for i in range(*index.indices(self.num_spans))]
        # The range supports negative indices and raises IndexError, as a list does.
        index = index if 0 <= index < self.num_spans else range(self.num_spans)[index]
        return Span(index * self.size, (index + 1) * self.size)


def are_even(spans: Sequence[Span]) -> bool:
    """Return whether all spans have one size and are in the order of their ranks."""
    if isinstance(spans, EvenSpans):
        return True
    size = spans[0].numel
    return all(span == Span(i * size, (i + 1) * size) for i, span in enumerate(spans))


# The role of a parameter. Matrices are operands of matrix products. Vectors are biases and weights
# of norms, with any number of dimensions. Others are embeddings, convolutions, routers or unknown.
Role = Literal["matrix", "vector", "other"]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """The properties of a parameter that the plan depends on."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    in_block: bool = field(default=False, compare=False)  # belongs to a repeated block
    known_role: Role | None = None  # None: the shape decides

    @property
    def role(self) -> Role:
        return self.known_role or ("vector" if len(self.shape) <= 1 else "matrix")

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
    """The intersection of a parameter with a span of the flat buffer."""

    param: ParamSpec
    in_param: Span  # elements of the flattened parameter
    in_flat: Span  # the same elements, in the flat buffer


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """A flat buffer: its parameters, its padded length and the shard of each rank."""

    param_spans: tuple[ParamSpan, ...]
    numel: int
    shard_spans: Sequence[Span]  # a span per rank of a replica
    shares_per_shard: int = 1  # the number of replicas, if replicas share master weights

    @property
    def owned_spans(self) -> Sequence[Span]:
        """The spans of master weights: the shards, or the shares of even shards in rank order."""
        if self.shares_per_shard == 1:
            return self.shard_spans
        count = len(self.shard_spans) * self.shares_per_shard
        return EvenSpans(self.numel // count, count)

    def owned_span(self, rank: int, replica: int) -> Span:
        """Return the span of master weights that a rank of a replica updates."""
        share = replica if self.shares_per_shard > 1 else 0
        return self.owned_spans[rank * self.shares_per_shard + share]

    @property
    def share_spans(self) -> EvenSpans:
        """The replicas' shares, relative to the start of a shard; shards must be even."""
        return EvenSpans(self.shard_spans[0].numel // self.shares_per_shard, self.shares_per_shard)

    @property
    def params(self) -> tuple[ParamSpec, ...]:
        return tuple(each.param for each in self.param_spans)

    @property
    def trainable(self) -> bool:
        """Whether the parameters are trained: all of them or none."""
        return self.param_spans[0].param.trainable

    @property
    def is_bytes(self) -> bool:
        """Whether the elements are quantization codes of frozen weights."""
        return self.param_spans[0].param.dtype == "uint8"

    @property
    def is_even(self) -> bool:
        """Whether all shards have the same number of elements."""
        return are_even(self.shard_spans)

    @property
    def padding(self) -> tuple[Span, ...]:
        """The elements that belong to no parameter; they are always zero."""
        ends = [0, *(each.span.stop for each in self.param_spans)]
        starts = [*(each.span.start for each in self.param_spans), self.numel]
        return tuple(Span(*gap) for gap in zip(ends, starts, strict=True) if gap[0] < gap[1])

    def param_slices(self, within: Span) -> tuple[ParamSlice, ...]:
        """Return the non-empty slices of parameters within a span, in order."""
        slices = []
        for each in self.param_spans:
            overlap = each.span.intersect(within)
            if overlap is not None:
                slices.append(ParamSlice(each.param, overlap.shift(-each.span.start), overlap))
        return tuple(slices)


def flat_layout(params: Sequence[ParamSpec], num_shards: int, num_shares: int = 1) -> FlatLayout:
    """Lay out `params` in a buffer of `num_shards` even shards, each of `num_shares` shares.

    Vectors, which do not decay, come last: the optimizer's spans are then few and long.
    """
    param_spans, end = [], 0
    for param in sorted(params, key=decay_group):
        start = round_up(end, ALIGNMENT)
        end = start + param.numel
        param_spans.append(ParamSpan(param, Span(start, end)))
    numel = round_up(end, ALIGNMENT * num_shards * num_shares)
    shards = EvenSpans(numel // num_shards, num_shards)
    return FlatLayout(tuple(param_spans), numel, shards, num_shares)


DECAY, NO_DECAY = 0, 1


def decay_group(param: ParamSpec) -> int:
    """Return the default group of a parameter: vectors don't decay."""
    return NO_DECAY if param.role == "vector" else DECAY


@dataclass(frozen=True, slots=True)
class OptimizerSpan:
    """A maximal, aligned span of parameters of one group, stepped as one tensor."""

    span: Span
    group: int
    separate_param: ParamSpec | None = None  # the only parameter, if it must be stepped separately


def optimizer_spans(
    layout: FlatLayout,
    within: Span,
    group_of: Callable[[ParamSpec], int],
    is_separate: Callable[[ParamSpec], bool] = lambda param: False,
) -> tuple[OptimizerSpan, ...]:
    """Cut `within` wherever the group changes; padding belongs to the parameter before it.

    `within` must start and end on a multiple of ALIGNMENT. Padding before its first parameter is
    left out. A parameter for which `is_separate` is true has a span of its own.
    """
    spans: list[OptimizerSpan] = []
    for param_slice in layout.param_slices(within):
        param, start = param_slice.param, param_slice.in_flat.start
        group, separate_param = group_of(param), param if is_separate(param) else None
        if spans:
            last = spans[-1]
            if last.group == group and last.separate_param is None and separate_param is None:
                continue
            # The last span ends where the next one starts.
            spans[-1] = replace(last, span=Span(last.span.start, start))
        spans.append(OptimizerSpan(Span(start, within.stop), group, separate_param))
    return tuple(spans)
