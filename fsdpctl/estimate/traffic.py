"""What a rank sends in a step, by the plan of our engine and by the ways of PyTorch's own.

In rings: of n ranks each sends (n - 1) / n of a tensor that is gathered, or reduced to parts, and
twice that of one that is all-reduced. Messages from everybody to everybody, and broadcasts of all
parts, take as much on the average of the ranks.
"""

from collections import Counter
from dataclasses import dataclass, replace

from fsdpctl.config.schema import Config
from fsdpctl.estimate.run_plan import item_sizes, plan_run
from fsdpctl.plan.schedule import EventKind
from fsdpctl.plan.sizes import RankPlace
from fsdpctl.plan.strategy import get_strategy
from fsdpctl.plan.transport import adds_whole
from fsdpctl.plan.units import UnitSpec
from fsdpctl.predict.engine_bytes import TrainingPlan, planned_step, planned_update
from fsdpctl.predict.fsdp2_steps import FullyShard
from fsdpctl.resolve.machine import world_size


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that a rank sends in a step."""

    within: float  # among the ranks that share a copy
    between: float  # to those that hold the same part of other copies

    @property
    def total(self) -> int:
        """Both."""
        return round(self.within + self.between)


def sent_in_step(config: Config, units: tuple[UnitSpec, ...], num_micro_batches: int) -> Sent:
    """For a resolved configuration of any engine, whose model has these units, root first."""
    every = config.accumulation.name == "every"
    reduces = (*[every] * (num_micro_batches - 1), True)
    if config.engine.name == "ddp":
        trained = sum(p.numel for unit in units for p in unit.params if p.trainable)
        nbytes = trained * item_sizes(config).master * sum(reduces)
        return Sent(2 * _share(world_size(config)) * nbytes, 0)
    plan, place = plan_run(config, units, num_micro_batches)
    plan = replace(plan, reduces=reduces)
    if config.engine.name == "fsdp2":
        return _sent_by_fully_shard(config, units, plan, place)
    return sent_by_plan(plan, place)


def sent_by_plan(plan: TrainingPlan, place: RankPlace) -> Sent:
    """What our engine sends for the micro-steps of `plan`."""
    nbytes: Counter[EventKind] = Counter()
    for event in [*planned_step(plan, place), *planned_update(plan, place)]:
        nbytes[event.kind] += event.nbytes
    size, copies = place.size, place.num_replicas
    whole = not plan.strategy.shards_grads
    passes = 2 if whole and adds_whole(place.transport, size) else 1
    within = nbytes[EventKind.GATHER] + nbytes[EventKind.REDUCE] * passes
    over_copies = 1 if plan.strategy.shards_over_copies else 2
    if copies > 1:
        between = nbytes[EventKind.COMBINE] * over_copies + nbytes[EventKind.SYNC]
        return Sent(within * _share(size), between * _share(copies))
    # What follows brings the parts of one copy together again.
    within += nbytes[EventKind.COMBINE] + nbytes[EventKind.SYNC]
    return Sent(within * _share(size), 0)


def _sent_by_fully_shard(
    config: Config, units: tuple[UnitSpec, ...], plan: TrainingPlan, place: RankPlace
) -> Sent:
    reshards = get_strategy(config.strategy.name).reshard_after_forward
    model = FullyShard(
        units, place.size, plan.sizes, reshards=reshards, prefetch=1, reduces=plan.reduces
    )
    groups = model.groups()
    kept = {model.root, [model.root, *groups][-1]}  # the last block is not freed in between
    gathered = sum(
        param.numel * (2 if reshards and name not in kept else 1)
        for name, params in groups.items()
        for param in params
    )
    trained = sum(p.numel for params in groups.values() for p in params if p.trainable)
    reduced = trained * plan.sizes.reduce * sum(plan.reduces)
    within = gathered * plan.sizes.param * len(plan.reduces) + reduced
    between = 2 * reduced / place.size * _share(place.num_replicas)
    return Sent(within * _share(place.size), between)


def _share(size: int) -> float:
    return (size - 1) / size
