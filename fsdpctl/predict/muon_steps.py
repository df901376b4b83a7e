"""Muon's part of the optimizer's step: temporary tensors, and matrix products."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from fsdpctl.plan.layout import ParamSpec
from fsdpctl.plan.muon import Muon, Shape, is_muons, matrices_of, muon_flops
from fsdpctl.plan.sizes import RankPlace
from fsdpctl.predict.compute import Work, WorkKind
from fsdpctl.predict.recorder import Category, Recorder
from fsdpctl.predict.training_plan import TrainingPlan, held_masters

# Of the elementwise operators: passes over weights, gradient and mean, and bytes in bfloat16.
_MASTER_PASSES, _BYTES = 11, 10


def _owned(plan: TrainingPlan, place: RankPlace) -> Iterator[ParamSpec]:
    """Yield the matrices that a rank updates."""
    if plan.states.muon is None:
        return
    for layouts in plan.layouts.values():
        for layout in layouts:
            for piece in layout.pieces(held_masters(plan, place, layout)):
                if is_muons(piece.param):
                    yield piece.param


def matrix_elements(plan: TrainingPlan, place: RankPlace) -> int:
    """Return the elements that a rank updates by Muon."""
    return sum(param.numel for param in _owned(plan, place))


def update_matrices(plan: TrainingPlan, place: RankPlace, recorder: Recorder) -> None:
    """Update the matrices of a rank, in the time of the rank with the most work.

    Matrices of one shape use the same memory.
    """
    muon = plan.states.muon
    if muon is None:
        return
    recorder.at("the optimizer's step")
    for shape in sorted({matrices_of(param) for param in _owned(plan, place)}):
        keys: dict[str, int] = {}
        for what, nbytes in muon.tensors(shape, plan.sizes.master):
            if nbytes:
                keys[what] = recorder.allocate(Category.WORKSPACES, "", f"Muon: {what}", nbytes)
            else:
                recorder.free(keys.pop(what))
    busiest = _owned(plan, _busiest(plan, place))
    works = [_works(muon, matrices_of(param), plan.sizes.master) for param in busiest]
    recorder.update([work for of_shape in works for work in of_shape], "Muon")


def _busiest(plan: TrainingPlan, place: RankPlace) -> RankPlace:
    if not plan.strategy.shards_optimizer:
        return place
    places = [replace(place, rank=rank) for rank in range(place.size)]
    return max(places, key=lambda each: sum(map(muon_flops, _owned(plan, each))))


@functools.cache
def _works(muon: Muon, shape: Shape, itemsize: int) -> tuple[Work, ...]:
    """Return the operators of a matrix's update: its products, and passes over its elements."""
    passes = prod(shape) * (_MASTER_PASSES * itemsize + _BYTES)
    products = []
    for dims in muon.products(shape):
        batch, rows, columns, length = dims
        nbytes = 2 * batch * (rows * length + length * columns + rows * columns)
        products.append(Work("mm", WorkKind.MATMUL, 2 * prod(dims), nbytes, 2, dims))
    return (*products, Work("lerp_", WorkKind.MEMORY, 0, passes, itemsize))
