"""A run's steps as estimates see them, and what an optimizer keeps and needs in them."""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdpctl.plan.layout import FlatLayout, optimizer_spans
from fsdpctl.plan.optimizers import ADAMW_STATES, OptimizerStates
from fsdpctl.plan.precision import BufferDtypes
from fsdpctl.plan.step_plan import StepPlan
from fsdpctl.predict.step_recorder import Category, StepRecorder


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """All settings of a run that determine a rank's memory."""

    step: StepPlan
    reduces_gradients: tuple[bool, ...]  # per micro-step, whether its backward reduces
    states: OptimizerStates = ADAMW_STATES

    @property
    def dtypes(self) -> BufferDtypes:
        return self.step.typical_dtypes

    def at(self, rank: int, replica: int = 0) -> "TrainingPlan":
        return TrainingPlan(self.step.at(rank, replica), self.reduces_gradients, self.states)

    def states_of(self, layout: FlatLayout) -> int:
        kept, held = self.states, self.step.master_span(layout)
        runs = optimizer_spans(layout, held, kept.key, kept.is_separate)
        master = self.step.dtypes_of(layout).master.itemsize
        return sum(sum(kept.of_span(run, master)) for run in runs)

    @property
    def states_bytes(self) -> int:
        return sum(map(self.states_of, self.step.all_trained()))

    @property
    def host_states_bytes(self) -> int:
        """The bytes of a rank's states, parameters and pinned buffers in host memory."""
        return self.step.host_memory.nbytes + (self.states_bytes if self.step.steps_on_host else 0)


class TorchOptimizer:
    """The end of a step of PyTorch's engines, by torch's optimizer."""

    def __init__(self, plan: TrainingPlan, recorder: StepRecorder, *, fused: bool) -> None:
        """AdamW runs in one kernel if `fused`, else tensor by tensor with a temporary each."""
        self._plan, self._recorder, self._fused = plan, recorder, fused
        self._has_states = False

    def step(self, shards: Sequence[tuple[str, int]]) -> None:
        """End a step; `shards` are the bytes of each tensor, with its unit."""
        recorder, states = self._recorder, self._plan.states
        recorder.begin_phase("the optimizer's step")
        if not self._has_states:
            self._has_states = True
            for unit, nbytes in shards:
                for size in states.of(nbytes):
                    recorder.allocate(Category.OPTIMIZER_STATES, unit, "optimizer states", size)
        if not self._fused:  # torch's default AdamW copies second moments
            of, what = Category.OPTIMIZER_STATES, "roots of second moments"
            recorder.free(*[recorder.allocate(of, unit, what, nbytes) for unit, nbytes in shards])
        itemsize = self._plan.dtypes.master.itemsize
        recorder.optimizer_step(sum(n for _, n in shards) // itemsize, itemsize, states.moments)
        recorder.end_step()
