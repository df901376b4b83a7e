"""The training plan that estimates replay, and the step of torch's optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdpctl.plan.layout import FlatLayout, optimizer_spans
from fsdpctl.plan.optimizers import ADAMW_STATES, OptimizerStates
from fsdpctl.plan.precision import BufferDtypes
from fsdpctl.plan.step_plan import StepPlan
from fsdpctl.predict.step_recorder import Category, StepRecorder


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The settings of a run that determine the memory of a rank."""

    step_plan: StepPlan
    reduces_gradients: tuple[bool, ...]  # for each pass of a step, whether its backward reduces
    states: OptimizerStates = ADAMW_STATES

    @property
    def dtypes(self) -> BufferDtypes:
        return self.step_plan.typical_dtypes

    def at(self, rank: int, replica: int = 0) -> "TrainingPlan":
        return replace(self, step_plan=self.step_plan.at(rank, replica))

    def states_of(self, layout: FlatLayout) -> int:
        """Return the bytes of the rank's optimizer states for a flat buffer."""
        states, masters = self.states, self.step_plan.master_span(layout)
        spans = optimizer_spans(layout, masters, states.group, states.is_separate)
        itemsize = self.step_plan.dtypes_of(layout).master.itemsize
        return sum(sum(states.of_span(span, itemsize)) for span in spans)

    @property
    def states_bytes(self) -> int:
        """The bytes of the rank's optimizer states."""
        return sum(map(self.states_of, self.step_plan.all_trained()))

    @property
    def host_model_bytes(self) -> int:
        """The bytes of a rank's parameters, states and pinned buffers in host memory."""
        states = self.states_bytes if self.step_plan.steps_on_host else 0
        return self.step_plan.host_memory.nbytes + states


class TorchOptimizer:
    """The optimizer step of PyTorch's engines."""

    def __init__(self, plan: TrainingPlan, recorder: StepRecorder, *, fused: bool) -> None:
        """Use one kernel for AdamW if `fused`, else a temporary tensor per parameter."""
        self._plan, self._recorder, self._fused = plan, recorder, fused
        self._has_states = False

    def step(self, shards: Sequence[tuple[str, int]]) -> None:
        """Record the optimizer step; `shards` are the units and bytes of all tensors."""
        recorder, states = self._recorder, self._plan.states
        recorder.begin_phase("the optimizer's step")
        if not self._has_states:
            self._has_states = True
            for unit, nbytes in shards:
                for size in states.of_tensor(nbytes):
                    recorder.allocate(Category.OPTIMIZER_STATES, unit, "optimizer states", size)
        if not self._fused:  # torch's default AdamW allocates the roots of all second moments
            category, roots = Category.OPTIMIZER_STATES, "roots of second moments"
            keys = [recorder.allocate(category, unit, roots, nbytes) for unit, nbytes in shards]
            recorder.free(*keys)
        itemsize = self._plan.dtypes.master.itemsize
        recorder.optimizer_step(sum(n for _, n in shards) // itemsize, itemsize, states.moments)
        recorder.end_step()
