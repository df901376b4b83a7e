"""The memory of fsdpctl's engine on a rank, exactly as planned.

It includes master weights, gradients, optimizer states, gathered parameters, and the buffers in
which gradients are reduced. It excludes activations, and gradients of autograd until the engine
collects the gradients.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from fsdpctl.plan.layout import FlatLayout
from fsdpctl.plan.optimizers import OptimizerStates, is_compressible
from fsdpctl.predict.fsdpctl_steps import FsdpctlSteps
from fsdpctl.predict.step_recorder import Category, StepRecorder
from fsdpctl.predict.training_plan import TrainingPlan

ENGINE_CATEGORIES = (
    Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATES,
    Category.GATHERED_UNITS, Category.REDUCE_BUFFERS,
)  # fmt: skip


class EngineBytes(StepRecorder):
    """A recorder of the bytes that the engine has allocated, by category."""

    def __init__(self) -> None:
        self.nbytes = dict.fromkeys(ENGINE_CATEGORIES, 0)
        self.history: list[dict[Category, int]] = []  # after each change
        self._sizes: list[tuple[Category, int]] = []  # index: key

    def allocate(
        self, category: Category, unit: str, description: str, nbytes: int, *, stream: int = 0
    ) -> int:
        self._sizes.append((category, nbytes))
        self._change(category, nbytes)
        return len(self._sizes) - 1

    def free(self, *keys: int | None) -> None:
        for key in (each for each in keys if each is not None):
            category, nbytes = self._sizes[key]
            self._change(category, -nbytes)

    def recategorize(self, key: int, category: Category, description: str) -> None:
        old_category, nbytes = self._sizes[key]
        self._sizes[key] = category, nbytes
        self.nbytes[old_category] -= nbytes  # not by `_change`: a move is one entry of the history
        self._change(category, nbytes)

    def _change(self, category: Category, nbytes: int) -> None:
        if category in self.nbytes:
            self.nbytes[category] += nbytes
            self.history.append(dict(self.nbytes))


@dataclass(frozen=True, slots=True)
class EnginePeak:
    """The peak memory of the engine on the fullest rank."""

    rank: int  # within its replica
    replica: int
    breakdown: dict[Category, int]  # at the peak
    largest: dict[Category, int]  # the peak of each category

    @property
    def peak_bytes(self) -> int:
        return sum(self.breakdown.values())


def engine_peak(plan: TrainingPlan) -> EnginePeak:
    """Return the peak of the rank that needs the most memory; the rank of `plan` is ignored."""
    return max(map(_peak_of_rank, fullest_ranks(plan)), key=lambda each: each.peak_bytes)


def _peak_of_rank(plan: TrainingPlan) -> EnginePeak:
    history, position = timeline(plan), plan.step_plan.position
    peak = max(history, key=lambda nbytes: sum(nbytes.values()))
    largest = {each: max(held[each] for held in history) for each in ENGINE_CATEGORIES}
    return EnginePeak(position.rank, position.replica, peak, largest)


def timeline(plan: TrainingPlan) -> list[dict[Category, int]]:
    """Return the bytes of a rank by category after each change in the second step."""
    recorder = EngineBytes()
    steps = FsdpctlSteps(plan, recorder)
    steps.setup(draws=False)
    steps.step()
    recorder.history = [dict(recorder.nbytes)]
    steps.step()
    return recorder.history


def fullest_ranks(plan: TrainingPlan) -> list[TrainingPlan]:
    """Return the plans of the ranks that may need the most memory."""
    layouts = list(plan.step_plan.all_layouts())
    if not all(layout.is_even for layout in layouts):
        return [plan.at(rank) for rank in range(len(layouts[0].shard_spans))]
    # Ranks differ only by optimizer states, which have more bytes for some parameters.
    indices = {0}.union(*(_unlike_spans(layout, plan.states) for layout in layouts))
    candidates = [plan.at(*divmod(i, layouts[0].shares_per_shard)) for i in sorted(indices)]
    if plan.states.dtype is None:
        return candidates  # one rank may have an additional step counter
    kinds = list(_kinds_of_layouts(plan))
    return [max(candidates, key=lambda each: sum(n * each.states_of(flat) for flat, n in kinds))]


def _kinds_of_layouts(plan: TrainingPlan) -> Iterator[tuple[FlatLayout, int]]:
    """Yield one layout of each kind of trained flat buffers with equal states, and their number."""
    kinds: dict[object, list[FlatLayout]] = {}
    key, is_separate = plan.states.group, plan.states.is_separate
    for layout in plan.step_plan.all_trained():
        signature = [(x.span, key(x.param), is_separate(x.param)) for x in layout.param_spans]
        kinds.setdefault((layout.numel, *signature), []).append(layout)
    yield from ((layouts[0], len(layouts)) for layouts in kinds.values())


def _unlike_spans(layout: FlatLayout, states: OptimizerStates) -> Iterator[int]:
    """Yield the indices of an even layout's owned spans that may have more states than others.

    The states of some parameters are separate tensors, or not compressed.
    """
    size = layout.owned_spans[0].numel
    for before, after in pairwise(layout.param_spans):
        if states.group(before.param) != states.group(after.param):
            yield after.span.start // size
    if states.dtype is not None:
        for each in layout.param_spans:
            if not is_compressible(each.param) and each.span.numel:
                yield from range(each.span.start // size, (each.span.stop - 1) // size + 1)
