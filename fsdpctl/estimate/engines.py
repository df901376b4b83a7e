"""Who writes down what a rank does: our engine, or one of PyTorch's own."""

from dataclasses import replace

from fsdpctl.plan.engines import DDP, FSDP2, check_strategy
from fsdpctl.plan.sizes import RankPlace
from fsdpctl.plan.strategy import Strategy
from fsdpctl.plan.units import UnitSpec
from fsdpctl.predict.ddp_steps import DataParallel, DataParallelSteps
from fsdpctl.predict.engine_bytes import TrainingPlan, estimate
from fsdpctl.predict.fsdp2_steps import FullyShard, FullyShardSteps
from fsdpctl.predict.own_steps import OwnSteps
from fsdpctl.predict.peak import Steps
from fsdpctl.predict.script import Writer

_REPLAYED = 16  # ranks, up to which each is replayed to find the fullest


def steps_of(
    engine: str,
    strategy: Strategy,
    units: tuple[UnitSpec, ...],
    plan: TrainingPlan,
    place: RankPlace,
    *,
    writer: Writer,
    fused: bool = True,
) -> tuple[Steps, int]:
    """The steps of the fullest rank, and which one that is.

    Args:
        engine: one of ENGINES.
        strategy: that was asked for; the plan's may be another where a rank is alone.
        units: root first.
        plan: of the run.
        place: of any rank.
        writer: what the steps write with.
        fused: `fsdp2`: whether AdamW runs in one kernel.

    Raises:
        UsageError: the engine has no such strategy.
    """
    check_strategy(engine, strategy)
    if engine == DDP:
        model = DataParallel(units, plan.sizes, len(plan.reduces), plan.states)
        return DataParallelSteps(model, writer), 0
    if engine == FSDP2:
        sharded = FullyShard(
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
        )
        return FullyShardSteps(sharded, writer), 0
    place = replace(place, rank=_fullest(plan, place))
    return OwnSteps(plan, place, writer), place.rank


def _fullest(plan: TrainingPlan, place: RankPlace) -> int:
    """The rank that holds most; among many the one that owns most, as all it keeps follows that."""
    layouts = [layout for of_unit in plan.layouts.values() for layout in of_unit]
    if all(layout.is_even for layout in layouts):
        return place.rank
    if place.size <= _REPLAYED:
        return estimate(plan, place).rank
    owned = [
        sum(part.numel for part in parts) for parts in zip(*(x.parts for x in layouts), strict=True)
    ]
    return owned.index(max(owned))
