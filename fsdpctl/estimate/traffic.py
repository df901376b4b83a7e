"""The bytes that a rank sends in a step."""

from dataclasses import dataclass, replace

from fsdpctl.config.schema import Config
from fsdpctl.estimate.engines import steps_of
from fsdpctl.estimate.run_plan import plan_run, reducing_passes
from fsdpctl.plan.sizes import RankPlace
from fsdpctl.plan.strategy import get_strategy
from fsdpctl.plan.units import UnitSpec
from fsdpctl.predict.engine_bytes import TrainingPlan
from fsdpctl.predict.fsdpctl_steps import FsdpctlSteps
from fsdpctl.predict.recorder import RankGroup, TrafficRecorder


@dataclass(frozen=True, slots=True)
class Sent:
    """The bytes that a rank sends in a step."""

    within: float  # to the ranks that share its replica
    between: float  # to the ranks that hold the same part of other replicas

    @property
    def total(self) -> int:
        """The sum of both."""
        return round(self.within + self.between)


def sent_in_step(config: Config, units: tuple[UnitSpec, ...], num_micro_batches: int) -> Sent:
    """Return what a rank sends for a resolved configuration, whose model has these units."""
    plan, place = plan_run(config, units, num_micro_batches)
    every = config.accumulation.name == "every"
    plan = replace(plan, reduces=reducing_passes(num_micro_batches, every=every))
    recorder, strategy = TrafficRecorder(), get_strategy(config.strategy.name)
    steps_of(config.engine.name, strategy, units, plan, place, recorder).step()
    return _sent(recorder, place)


def sent_by_plan(plan: TrainingPlan, place: RankPlace) -> Sent:
    """Return what a rank of fsdpctl's engine sends for the micro-steps of `plan`."""
    recorder = TrafficRecorder()
    FsdpctlSteps(plan, place, recorder).step()
    return _sent(recorder, place)


def _sent(recorder: TrafficRecorder, place: RankPlace) -> Sent:
    return Sent(
        recorder.sent(RankGroup.SHARD, place.size),
        recorder.sent(RankGroup.REPLICAS, place.num_replicas),
    )
