"""The assignment of optimizer states to ranks, if parameters stay unsharded.

Block means flat buffer here, not layer. `even` cuts every block evenly. The other maps assign full
blocks, or long spans of blocks, to one rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdpctl.errors import UsageError, did_you_mean
from fsdpctl.plan.layout import ALIGNMENT, Span, aligned_chunk, round_up

Sizes = Sequence[int]  # elements of each block
OWNER_MAPS = ("even", "round_robin", "contiguous", "balanced")


def _check(num_blocks: int, world_size: int) -> None:
    if num_blocks < 1 or world_size < 1:
        problem = f"expected blocks and ranks, got {num_blocks} blocks on {world_size} ranks"
        raise UsageError(f"owner map: {problem}")


@dataclass(frozen=True, slots=True)
class OwnerMap:
    """The span of each block that each rank owns; the spans cover a block once."""

    sizes: tuple[int, ...]  # elements of each block
    spans: tuple[tuple[Span, ...], ...]  # spans by block, then by rank; may be empty

    @property
    def num_blocks(self) -> int:
        return len(self.sizes)

    @property
    def world_size(self) -> int:
        return len(self.spans[0])

    @staticmethod
    def even(sizes: Sequence[int], world_size: int) -> "OwnerMap":
        """Cut every block into equal spans, rounded up to multiples of 64 elements."""
        _check(len(sizes), world_size)
        ranks = range(world_size)
        spans = [tuple(aligned_chunk(Span(0, x), i, world_size) for i in ranks) for x in sizes]
        return OwnerMap(tuple(sizes), tuple(spans))

    @staticmethod
    def round_robin(num_blocks: int, world_size: int, sizes: Sizes | None = None) -> "OwnerMap":
        """Assign block i to rank i modulo the number of ranks."""
        _check(num_blocks, world_size)
        owners = [block % world_size for block in range(num_blocks)]
        return _whole_blocks(owners, world_size, sizes)

    @staticmethod
    def contiguous(num_blocks: int, world_size: int, sizes: Sizes | None = None) -> "OwnerMap":
        """Assign adjacent blocks to each rank, in numbers that differ by at most one."""
        _check(num_blocks, world_size)
        owners = [block * world_size // num_blocks for block in range(num_blocks)]
        if world_size > num_blocks:  # the formula would leave out ranks between owners
            owners = list(range(num_blocks))
        return _whole_blocks(owners, world_size, sizes)

    @staticmethod
    def balanced(sizes: Sequence[int], world_size: int) -> "OwnerMap":
        """Assign blocks in order; continue with the next rank when a rank has its equal part.

        Cuts are at multiples of 64 elements. At most `world_size - 1` blocks are cut. No rank
        exceeds the mean by more than 64 elements.
        """
        _check(len(sizes), world_size)
        total = sum(sizes)
        # The end of each rank's elements, counted from the start of the first block.
        ends = [total * (rank + 1) // world_size for rank in range(world_size)]
        spans, begin = [], 0
        for size in sizes:
            inside = [min(max(end - begin, 0), size) for end in ends]
            cuts = [0, *(min(round_up(cut, ALIGNMENT), size) for cut in inside)]
            spans.append(tuple(map(Span, cuts, cuts[1:])))
            begin += size
        return OwnerMap(tuple(sizes), tuple(spans))

    def owners(self, block: int) -> dict[int, Span]:
        """Return the ranks that own elements of a block, with the spans that they own."""
        return {rank: span for rank, span in enumerate(self._spans_by_rank(block)) if span.numel}

    def owns(self, rank: int, block: int) -> bool:
        self._check_rank(rank)
        return self._spans_by_rank(block)[rank].numel > 0

    def spans_of(self, rank: int) -> dict[int, Span]:
        """Return the spans that a rank owns, by block."""
        self._check_rank(rank)
        return {block: parts[rank] for block, parts in enumerate(self.spans) if parts[rank].numel}

    def blocks_of(self, rank: int) -> list[int]:
        """Return the blocks of which a rank owns elements."""
        return list(self.spans_of(rank))

    def fraction_of(self, rank: int) -> float:
        """Return the fraction of all elements that a rank owns, from 0 to 1."""
        return sum(span.numel for span in self.spans_of(rank).values()) / sum(self.sizes)

    def for_sizes(self, sizes: Sequence[int], world_size: int) -> "OwnerMap":
        """Return this map for blocks of `sizes`.

        UsageError if the number of blocks or ranks differs, or if it cuts blocks of other sizes.
        """
        if (self.num_blocks, self.world_size) != (len(sizes), world_size):
            problem = f"expected {len(sizes)} blocks on {world_size} ranks"
            raise UsageError(f"owner_map: {problem}, got {self.num_blocks} on {self.world_size}")
        if self.sizes == tuple(sizes):
            return self
        owners = [list(self.owners(block)) for block in range(self.num_blocks)]
        if any(len(each) != 1 for each in owners):
            raise UsageError("owner_map: cuts blocks whose sizes differ from the model's")
        return _whole_blocks([each[0] for each in owners], world_size, sizes)

    def to_dict(self) -> dict[str, list[object]]:
        """Return plain lists, for JSON."""
        spans = [[[span.start, span.stop] for span in block] for block in self.spans]
        return {"sizes": list(self.sizes), "parts": list(spans)}

    @staticmethod
    def from_dict(content: Mapping[str, list[list[list[int]]]]) -> "OwnerMap":
        spans = tuple(tuple(Span(*span) for span in block) for block in content["parts"])
        sizes = tuple(block[-1].stop if block else 0 for block in spans)
        return OwnerMap(sizes, spans)

    def _spans_by_rank(self, block: int) -> tuple[Span, ...]:
        if not 0 <= block < self.num_blocks:
            raise UsageError(f"block {block}: expected a block from 0 to {self.num_blocks - 1}")
        return self.spans[block]

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise UsageError(f"rank {rank}: expected a rank from 0 to {self.world_size - 1}")


def _whole_blocks(owners: Sequence[int], world_size: int, sizes: Sequence[int] | None) -> OwnerMap:
    sizes = [1] * len(owners) if sizes is None else sizes
    spans = []
    for owner, size in zip(owners, sizes, strict=True):
        # The start of each rank's span, and the end of the last one.
        cuts = [0 if rank <= owner else size for rank in range(world_size + 1)]
        spans.append(tuple(map(Span, cuts, cuts[1:])))
    return OwnerMap(tuple(sizes), tuple(spans))


def make_owner_map(name: str, sizes: Sequence[int], world_size: int) -> OwnerMap:
    """Return the owner map called `name` for blocks of the given sizes."""
    if name == "even":
        return OwnerMap.even(sizes, world_size)
    if name == "round_robin":
        return OwnerMap.round_robin(len(sizes), world_size, sizes)
    if name == "contiguous":
        return OwnerMap.contiguous(len(sizes), world_size, sizes)
    if name == "balanced":
        return OwnerMap.balanced(sizes, world_size)
    names = ", ".join(OWNER_MAPS)
    raise UsageError(f"owner_map={name}: expected one of {names}{did_you_mean(name, OWNER_MAPS)}")
