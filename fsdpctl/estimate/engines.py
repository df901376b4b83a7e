"""The steps of each engine, for any recorder."""

from fsdpctl.plan.engines import DDP, OURS, check_strategy
from fsdpctl.plan.sizes import RankPlace
from fsdpctl.plan.strategy import Strategy
from fsdpctl.plan.transport import Transport
from fsdpctl.plan.units import UnitSpec
from fsdpctl.predict.ddp_steps import DdpModel, DdpSteps
from fsdpctl.predict.engine_bytes import TrainingPlan, estimate
from fsdpctl.predict.fsdp2_steps import Fsdp2Model, Fsdp2Steps
from fsdpctl.predict.fsdpctl_steps import FsdpctlSteps
from fsdpctl.predict.recorder import Recorder, Steps

_REPLAYED = 16  # ranks, up to which each is replayed to find the fullest


def steps_of(
    engine: str,
    strategy: Strategy,
    units: tuple[UnitSpec, ...],
    plan: TrainingPlan,
    place: RankPlace,
    recorder: Recorder,
    *,
    fused: bool = True,
) -> Steps:
    """Return the steps of a rank.

    Args:
        engine: one of ENGINES.
        strategy: the requested one; the plan's may differ if a rank is alone.
        units: root first.
        plan: of the run.
        place: of the rank.
        recorder: what the steps are recorded in.
        fused: `fsdp2`: whether AdamW runs in one kernel.

    Raises:
        UsageError: If the engine does not support the strategy.
    """
    check_strategy(engine, strategy)
    if engine == DDP:
        return DdpSteps(DdpModel(units, plan.sizes, plan.reduces, plan.states), recorder)
    if engine == OURS:
        return FsdpctlSteps(plan, place, recorder)
    model = Fsdp2Model(
        units,
        place.size if plan.strategy.shards_params else 1,
        plan.sizes,
        reshards=strategy.reshard_after_forward,
        prefetch=max(1, plan.prefetch.backward),
        reduces=plan.reduces,
        ahead=plan.prefetch.forward if plan.prefetch.forward > 1 else 0,
        states=plan.states,
        replicates=place.num_replicas > 1,
        fused=fused,
        overlaps=place.transport is Transport.NCCL,
    )
    return Fsdp2Steps(model, recorder)


def fullest_rank(engine: str, plan: TrainingPlan, place: RankPlace) -> int:
    """Return the rank that needs the most memory.

    Among many ranks, this is the one that owns the most, because all it keeps follows from that.
    """
    layouts = [layout for of_unit in plan.layouts.values() for layout in of_unit]
    if engine != OURS or all(layout.is_even for layout in layouts):
        return 0
    if place.size <= _REPLAYED:
        return estimate(plan, place).rank
    owned = [
        sum(part.numel for part in parts) for parts in zip(*(x.parts for x in layouts), strict=True)
    ]
    return owned.index(max(owned))
