"""The optimizer's step of fsdpctl's engine: on the device, in tiles, by matrices, on the host."""

import functools
from collections.abc import Iterator
from itertools import chain
from math import prod

from fsdpctl.plan.layout import ParamSpec, optimizer_spans
from fsdpctl.plan.optimizers import (
    MatrixShape,
    MuonSettings,
    matrix_shape,
    muon_flops,
    tile_bytes,
    uses_muon,
)
from fsdpctl.plan.step_plan import StepPlan, Transport
from fsdpctl.plan.strategy import Offload
from fsdpctl.predict.hardware import HostQueue
from fsdpctl.predict.model_pass import Work, WorkKind
from fsdpctl.predict.step_recorder import Category, StepRecorder
from fsdpctl.predict.training_plan import TrainingPlan

# Bytes per element that take as long to move as the host's step in tiles takes, by
# benchmarks/update_time.py: six times the traffic of a step in float32.
_HOST_TILE_BYTES = 6 * 32
# Muon's elementwise operators, per element: passes over weights, gradient and mean in the dtype of
# master weights, and bytes in bfloat16.
_MASTER_PASSES, _BF16_BYTES = 11, 10
_NO_GROUP = -1  # parameters without a gradient


class HostSchedule:
    """The gradients that a rank copies to its host, the steps of the host, and their results.

    The host steps units in the order of the next forward, each unit when its gradient has arrived.
    Computation with a unit waits only for the result of the unit.
    """

    def __init__(self, plan: TrainingPlan, recorder: StepRecorder) -> None:
        self._plan, self._recorder = plan, recorder
        step = plan.step_plan
        units = (step.order.root, *step.order.forward) if step.steps_on_host else ()
        owned = {unit: sum(step.master_span(x).numel for x in step.trained[unit]) for unit in units}
        self._owned = {unit: numel for unit, numel in owned.items() if numel}
        self._gradient_copies: dict[str, int] = {}  # copies to the host, by unit
        self._last_copy: int | None = None  # until it ends, its gradient must not be freed
        self._results: dict[str, int] = {}  # copies to the device or steps, by unit

    def offload_gradients(self, unit: str) -> None:
        """Copy the reduced gradients of a unit to the host, added to gradients in host memory."""
        if Offload.GRADIENTS not in self._plan.step_plan.offload or unit not in self._owned:
            return
        self.wait_for_copy()
        recorder, nbytes = self._recorder, self._owned[unit] * self._plan.dtypes.gradient.itemsize
        if unit in self._gradient_copies:
            after = (self._gradient_copies[unit],)
            label = f"earlier gradients of {unit}"
            recorder.wait(recorder.start_host(HostQueue.UP, nbytes, label, after=after))
            recorder.copy(3 * nbytes, f"sum of {unit}")
        recorder.copy(nbytes, f"norm of {unit}")
        self._last_copy = recorder.start_host(HostQueue.DOWN, nbytes, f"gradients of {unit}")
        self._gradient_copies[unit] = self._last_copy

    def wait_for_copy(self) -> None:
        """Wait for the last copy of gradients, which can then be freed on the device."""
        self._recorder.wait(self._last_copy)
        self._last_copy = None

    def step(self) -> None:
        """Step all units on the host; two pinned buffers per direction limit copies in flight."""
        recorder, dtypes = self._recorder, self._plan.dtypes
        fetches = self._plan.step_plan.fetches_gradients
        owned = sum(self._owned.values()) if fetches else 0
        recorder.gradient_norm(owned * dtypes.gradient.itemsize)
        # A transfer starts after the transfer before the last, which has used its pinned buffer.
        steps: list[int] = []
        results: list[int] = []
        for unit, numel in self._owned.items():
            if fetches:
                label, nbytes = f"gradients of {unit}", numel * dtypes.gradient.itemsize
                copy = recorder.start_host(HostQueue.DOWN, nbytes, label, after=tuple(steps[-2:-1]))
            else:
                copy = self._gradient_copies.pop(unit)
            after, nbytes = (*results[-2:-1], copy), numel * _step_traffic(self._plan)
            steps.append(recorder.start_host(HostQueue.STEPS, nbytes, f"step {unit}", after=after))
            if Offload.PARAMS not in self._plan.step_plan.offload:
                label, nbytes = f"parameters of {unit}", numel * dtypes.compute.itemsize
                results.append(recorder.start_host(HostQueue.UP, nbytes, label, after=(steps[-1],)))
            self._results[unit] = (results or steps)[-1]

    def wait(self, unit: str) -> None:
        """Wait for the updated parameters of a unit."""
        self._recorder.wait(self._results.pop(unit, None), "optimizer")


def _step_traffic(plan: TrainingPlan) -> int:
    """Return the bytes per element that are read and written in host memory during a step.

    AdamW reads and writes master weight, moments and gradient, which it scales in place, and writes
    the parameter in the compute dtype. A step in tiles counts as the traffic that takes as long.
    Meanwhile the device reads the result unless parameters stay on the host, and writes gradients
    unless they were offloaded during backward.
    """
    dtypes = plan.dtypes
    stepped = 2 * (dtypes.gradient.itemsize + (1 + plan.states.moments) * dtypes.master.itemsize)
    if plan.states.dtype is not None:
        stepped = _HOST_TILE_BYTES
    cast = dtypes.compute.itemsize if dtypes.compute.itemsize != dtypes.master.itemsize else 0
    fetched = dtypes.gradient.itemsize if plan.step_plan.fetches_gradients else 0
    read = 0 if Offload.PARAMS in plan.step_plan.offload else dtypes.compute.itemsize
    return stepped + cast + read + fetched


def allocate_states(plan: TrainingPlan, recorder: StepRecorder) -> None:
    """Allocate the optimizer states of parameters with gradients, group by group."""
    step, states = plan.step_plan, plan.states

    def group_of(param: ParamSpec) -> int:
        return states.group(param) if recorder.has_gradient(param) else _NO_GROUP

    spans = [
        (span, unit)
        for unit, layouts in step.trained.items()
        for layout in layouts
        for span in optimizer_spans(layout, step.master_span(layout), group_of, states.is_separate)
        if span.group != _NO_GROUP
    ]
    for span, unit in sorted(spans, key=lambda each: each[0].group):
        for size in states.of_span(span, plan.dtypes.master.itemsize):
            recorder.allocate(Category.OPTIMIZER_STATES, unit, "optimizer states", size)


def allocate_tiles(plan: TrainingPlan, recorder: StepRecorder) -> None:
    """Allocate the temporary memory of a step in tiles, if the step is in tiles."""
    step = plan.step_plan
    if plan.states.dtype is None or step.steps_on_host:
        return
    key, layouts = plan.states.group, step.all_trained()
    spans = chain(*(optimizer_spans(each, step.master_span(each), key) for each in layouts))
    device = "cuda" if step.position.transport is Transport.NCCL else "cpu"
    largest = max((each.span.numel for each in spans), default=0)
    recorder.allocate_temporary(tile_bytes(largest, device, plan.states.dtype))


def tile_traffic(plan: TrainingPlan, numel: int) -> float:
    """Return the bytes that a fused step in tiles reads and writes; 0 for other steps."""
    if plan.states.dtype is None:
        return 0
    dtypes = plan.dtypes
    weight = dtypes.master.itemsize + dtypes.has_remainders  # a remainder has 1 byte
    return numel * (dtypes.gradient.itemsize + 2 * weight) + 2 * plan.states_bytes


def record_muon(plan: TrainingPlan, recorder: StepRecorder) -> int:
    """Record the updates of matrices if the optimizer is Muon; return the elements of this rank's.

    The time is the time of the rank with the most work. Matrices of one shape reuse the memory.
    """
    muon, itemsize = plan.states.muon, plan.dtypes.master.itemsize
    if muon is None:
        return 0
    recorder.begin_phase("the optimizer's step")
    owned = list(_matrices(plan.step_plan))
    for shape in sorted(set(map(matrix_shape, owned))):
        keys: dict[str, int] = {}
        for name, nbytes in muon.tensors(shape, itemsize):
            if nbytes:
                keys[name] = recorder.allocate(Category.WORKSPACES, "", f"Muon: {name}", nbytes)
            else:
                recorder.free(keys.pop(name))
    matrices = _most_matrices(plan.step_plan)
    operators = chain(*(_operators(muon, matrix_shape(param), itemsize) for param in matrices))
    recorder.optimizer_operators(list(operators), "Muon")
    return sum(param.numel for param in owned)


def _matrices(step: StepPlan) -> Iterator[ParamSpec]:
    for layout in step.all_layouts():
        for each in layout.param_slices(step.master_span(layout)):
            if uses_muon(each.param):  # with Muon, no rank owns only a part of a matrix
                yield each.param


def _most_matrices(step: StepPlan) -> Iterator[ParamSpec]:
    position = step.position
    ranks = range(position.num_shards) if step.strategy.shards_optimizer else [position.rank]
    steps = (step.at(rank, position.replica) for rank in ranks)
    return _matrices(max(steps, key=lambda each: sum(map(muon_flops, _matrices(each)))))


@functools.cache
def _operators(muon: MuonSettings, shape: MatrixShape, itemsize: int) -> tuple[Work, ...]:
    """Return the operators of a matrix's update: products, and passes over its elements."""
    products = []
    for dims in muon.products(shape):
        batch, rows, columns, inner = dims
        nbytes = 2 * batch * (rows * inner + inner * columns + rows * columns)
        products.append(Work("mm", WorkKind.MATMUL, 2 * prod(dims), nbytes, 2, dims))
    nbytes = prod(shape) * (_MASTER_PASSES * itemsize + _BF16_BYTES)
    return (*products, Work("lerp_", WorkKind.MEMORY, 0, nbytes, itemsize))
