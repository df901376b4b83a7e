"""Muon's matrices: which parameters it steps, what they cost, and owners that have them whole."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from fsdpctl.plan.layout import FlatLayout, ParamSpec, Span
from fsdpctl.plan.owners import OwnerMap

MUON = "muon"
MATRICES = "matrices"  # the owner map that cuts no matrix of Muon
CUTTING = ("even", "balanced")  # owner maps that cut flat buffers anywhere
NS_STEPS = 5

Shape = tuple[int, int, int]  # matrices, rows and columns


def is_muons(param: ParamSpec) -> bool:
    """Return whether Muon steps a parameter: a matrix of a block, or one for each expert.

    Embedding, head, vectors, routers and convolutions are left to AdamW.
    """
    is_matrix = len(param.shape) in (2, 3) and min(param.shape[-2:]) > 1
    return param.trainable and param.in_block and param.role == "matrix" and is_matrix


def matrices_of(param: ParamSpec) -> Shape:
    """Return the number and the shape of the matrices in a parameter."""
    count = param.shape[0] if len(param.shape) == 3 else 1
    return count, param.shape[-2], param.shape[-1]


@dataclass(frozen=True, slots=True)
class Muon:
    """The settings that determine what Muon's updates cost."""

    ns_steps: int = NS_STEPS
    nesterov: bool = True

    def tensors(self, shape: Shape, itemsize: int) -> Iterator[tuple[str, int]]:
        """Yield the temporary tensors of an update with their bytes as they are made, 0: freed.

        `itemsize` is that of the master weights.
        """
        numel, square = prod(shape), shape[0] * min(shape[1:]) ** 2
        update, following = "update", "next update"
        if self.nesterov and itemsize != 2:
            yield from (("gradient", itemsize * numel), (update, 2 * numel), ("gradient", 0))
        else:
            yield update, 2 * numel
        for _ in range(self.ns_steps):
            yield from (("Gram matrix", 2 * square), ("polynomial", 2 * square), ("Gram matrix", 0))
            yield from ((following, 2 * numel), (update, 0), ("polynomial", 0))
            update, following = following, update
        yield update, 0

    def products(self, shape: Shape) -> list[tuple[int, int, int, int]]:
        """Return the matrix products of an update: batch, rows, columns and sums of each."""
        count, short, long = shape[0], min(shape[1:]), max(shape[1:])
        step = [(count, short, short, long), (count, short, short, short)]
        return [*step, (count, short, long, short)] * self.ns_steps


def muon_flops(param: ParamSpec) -> int:
    """Return the FLOPs of a parameter's update; 0 if AdamW steps it."""
    products = Muon().products(matrices_of(param)) if is_muons(param) else ()
    return sum(2 * prod(each) for each in products)


def matrix_owners(layouts: Sequence[FlatLayout], num_ranks: int) -> OwnerMap:
    """Assign whole matrices to ranks so that each updates about as many, by their cost.

    The parameters of all flat buffers, laid end to end by their cost, are divided evenly; each
    belongs to the rank in whose share its middle is. Buffers without a matrix are cut evenly.
    """
    sizes = [layout.numel for layout in layouts]
    even = OwnerMap.even(sizes, num_ranks)
    costs = [[muon_flops(param) for param in layout.params] for layout in layouts]
    total, before, parts = sum(map(sum, costs)), 0, []
    for layout, of_layout, usual in zip(layouts, costs, even.parts, strict=True):
        if not any(of_layout):
            parts.append(usual)
            continue
        cuts = [0] * num_ranks + [layout.numel]  # where each rank's part begins
        begun = 0
        for placement, cost in zip(layout.placements, of_layout, strict=True):
            owner = min((2 * before + cost) * num_ranks // (2 * total), num_ranks - 1)
            before += cost
            for rank in range(begun, owner):
                cuts[rank + 1] = placement.span.start
            begun = max(begun, owner)
        for rank in range(begun + 1, num_ranks):
            cuts[rank] = layout.numel
        parts.append(tuple(map(Span, cuts, cuts[1:])))
    return OwnerMap(tuple(sizes), tuple(parts))
