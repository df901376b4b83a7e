"""The settings that determine the engine's memory, and the bytes that a rank keeps by them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdpctl.plan.layout import FlatLayout, Span, optimizer_runs
from fsdpctl.plan.offload import Offload
from fsdpctl.plan.schedule import Prefetch
from fsdpctl.plan.sizes import (
    HOST_BUFFERS,
    HOST_SCALARS,
    Itemsizes,
    RankPlace,
)
from fsdpctl.plan.strategy import Strategy
from fsdpctl.plan.units import UnitOrder
from fsdpctl.predict.kept_states import ADAMW, KeptStates
from fsdpctl.predict.recorder import Category, Recorder


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """All settings of a run that determine the engine's memory."""

    order: UnitOrder
    layouts: Mapping[str, Sequence[FlatLayout]]  # of every unit, root first
    strategy: Strategy  # the effective one
    sizes: Itemsizes
    prefetch: Prefetch
    reduces: tuple[bool, ...]  # per micro-step, whether its backward reduces
    states: KeptStates = ADAMW
    offload: Offload = Offload.NONE

    @property
    def steps_on_host(self) -> bool:
        """Whether the optimizer steps in host memory."""
        return Offload.STATES in self.offload

    @property
    def fetches_gradients(self) -> bool:
        """Whether the host fetches gradients for its step, which stay on the device until then."""
        return self.steps_on_host and Offload.GRADIENTS not in self.offload

    def is_on_host(self, layout: FlatLayout) -> bool:
        """Return whether the master weights of a flat buffer are in host memory."""
        return self.steps_on_host and layout.trainable

    def rests_on_host(self, layout: FlatLayout) -> bool:
        """Return whether the part of a flat buffer that is gathered is in host memory."""
        return Offload.PARAMS in self.offload and (self.steps_on_host or not layout.trainable)


def leaving_gradients(plan: TrainingPlan, place: RankPlace) -> dict[str, list[int]]:
    """Return the bytes of each gradient that a step on the host keeps on the device, by unit."""
    if not plan.fetches_gradients:
        return {}
    return {
        unit: [
            held_masters(plan, place, layout).numel * plan.sizes.grad
            for layout in layouts
            if layout.trainable
        ]
        for unit, layouts in plan.layouts.items()
    }


def host_states_bytes(plan: TrainingPlan, place: RankPlace) -> int:
    """Return the bytes of a rank's states, parameters and pinned buffers in host memory."""
    of_params = _host_params_bytes(plan, place)
    if not plan.steps_on_host:
        return of_params
    trained = [each for of in plan.layouts.values() for each in of if each.trainable]
    held = [held_masters(plan, place, layout).numel for layout in trained]
    sizes, largest = plan.sizes, max(held, default=0)
    nbytes = sum(held) * (sizes.master + sizes.remainder)
    nbytes += HOST_SCALARS + states_bytes(plan, place)
    in_flight = HOST_BUFFERS * largest
    nbytes += (in_flight if plan.fetches_gradients else sum(held)) * sizes.grad
    if sizes.param != sizes.master and Offload.PARAMS not in plan.offload:
        nbytes += in_flight * sizes.param
    return nbytes + of_params


def _host_params_bytes(plan: TrainingPlan, place: RankPlace) -> int:
    """Return the bytes of the parameters that rest on the host, without master weights."""
    return sum(
        layout.parts[place.rank].numel * plan.sizes.gathered(layout)
        for of_unit in plan.layouts.values()
        for layout in of_unit
        if plan.rests_on_host(layout)
        and not (layout.trainable and plan.sizes.param == plan.sizes.master)
    )


def held_masters(plan: TrainingPlan, place: RankPlace, layout: FlatLayout) -> Span:
    """Return the elements of a flat buffer whose master weights a rank has."""
    whole = Span(0, layout.numel)
    return layout.owned(place.rank, place.copy) if plan.strategy.shards_optimizer else whole


@dataclass(frozen=True, slots=True)
class AtRest:
    """The bytes that a rank keeps of a flat buffer between steps, without optimizer states."""

    part: int  # of what is gathered, where the master weights are less or elsewhere
    masters: int  # master weights, or frozen parameters, in memory of their own
    views: int  # those that are views of what stays unsharded
    remainder: int  # the lower bits of master weights, if they are kept apart


def at_rest(plan: TrainingPlan, place: RankPlace, layout: FlatLayout) -> AtRest:
    """Return what the rank of `place` keeps of a flat buffer."""
    sizes, keeps = plan.sizes, not plan.strategy.shards_params
    held = held_masters(plan, place, layout).numel
    rests = plan.rests_on_host(layout)
    nbytes = 0 if rests or plan.is_on_host(layout) else held * sizes.kept(layout)
    stays = keeps or layout.shares > 1
    is_view = stays and sizes.gathered(layout) == sizes.kept(layout)
    has_part = not (keeps or rests) and (layout.shares > 1 or plan.is_on_host(layout))
    part = layout.parts[place.rank].numel * sizes.gathered(layout) if has_part else 0
    is_split = layout.trainable and not plan.steps_on_host
    remainder = held * sizes.remainder if is_split else 0
    return AtRest(part, 0 if is_view else nbytes, nbytes if keeps and is_view else 0, remainder)


def trained_layouts(layouts: Mapping[str, Sequence[FlatLayout]]) -> Iterator[FlatLayout]:
    """Return the flat buffers whose parameters are trained."""
    return (each for of_unit in layouts.values() for each in of_unit if each.trainable)


def states_bytes(plan: TrainingPlan, place: RankPlace) -> int:
    """Return the bytes of the optimizer states."""
    return sum(buffer_states_bytes(plan, place, each) for each in trained_layouts(plan.layouts))


def buffer_states_bytes(plan: TrainingPlan, place: RankPlace, layout: FlatLayout) -> int:
    """Return the bytes of the optimizer states of a flat buffer."""
    kept, held = plan.states, held_masters(plan, place, layout)
    runs = optimizer_runs(layout, held, kept.key, kept.is_alone)
    return sum(sum(kept.of_run(run, plan.sizes.master)) for run in runs)


def step_of_torch(
    plan: TrainingPlan,
    recorder: Recorder,
    shards: Sequence[tuple[str, int]],
    *,
    has_states: bool,
    fused: bool,
) -> None:
    """End a step with torch's optimizer; `shards` are the bytes of each tensor, with its unit."""
    recorder.at("the optimizer's step")
    if not has_states:
        for unit, nbytes in shards:
            for size in plan.states.of(nbytes):
                recorder.allocate(Category.OPTIMIZER_STATES, unit, "optimizer states", size)
    if not fused:
        recorder.copy_moments(shards)
    numel = sum(nbytes for _, nbytes in shards) // plan.sizes.master
    recorder.optimize(numel, plan.sizes.master, plan.states.moments)
    recorder.end_step()
