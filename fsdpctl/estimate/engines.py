"""Who writes down what a rank does: our engine, or one of PyTorch's own."""

from dataclasses import replace

from fsdpctl.errors import UsageError
from fsdpctl.memory.ddp_steps import DataParallel, DataParallelSteps
from fsdpctl.memory.engine_bytes import TrainingPlan, estimate
from fsdpctl.memory.fsdp2_steps import FullyShard, FullyShardSteps
from fsdpctl.memory.own_steps import OwnSteps
from fsdpctl.memory.script import Writer
from fsdpctl.memory.simulate import Steps
from fsdpctl.plan.sizes import RankPlace
from fsdpctl.plan.strategy import STRATEGIES, Strategy
from fsdpctl.plan.units import UnitSpec

_REPLAYED = 16  # ranks, up to which each is replayed to find the fullest
ENGINES = ("fsdpctl", "fsdp2", "ddp")


def has_strategy(engine: str, strategy: Strategy) -> bool:
    """Whether an engine can do what a strategy says."""
    has_fsdp2 = strategy.shards_params and not strategy.shards_over_copies
    can = {"ddp": strategy.name == "no_shard", "fsdp2": has_fsdp2}
    return can.get(engine, True)


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
    if not has_strategy(engine, strategy):
        can = ", ".join(name for name, row in STRATEGIES.items() if has_strategy(engine, row))
        raise UsageError(f"engine={engine}: not with strategy={strategy.name}; it can {can}")
    if engine == "ddp":
        return DataParallelSteps(DataParallel(units, plan.sizes, len(plan.reduces)), writer), 0
    if engine == "fsdp2":
        model = FullyShard(
            units,
            place.size if plan.strategy.shards_params else 1,
            plan.sizes,
            reshards=strategy.reshard_after_forward,
            prefetch=max(1, plan.prefetch.backward),
            reduces=plan.reduces,
            replicates=place.num_replicas > 1,
            fused=fused,
        )
        return FullyShardSteps(model, writer), 0
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
