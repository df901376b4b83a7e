"""Predicts the time of a training step, on specified or profiled hardware."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fsdpctl.config.schema import Config
from fsdpctl.estimate.engines import steps_of
from fsdpctl.estimate.estimator import Estimator, batches_of
from fsdpctl.estimate.hardware import device_of, network_of
from fsdpctl.estimate.run_plan import plan_run
from fsdpctl.estimate.traced import TracedModel
from fsdpctl.plan.sizes import RankPlace
from fsdpctl.plan.strategy import get_strategy
from fsdpctl.predict.compute import Program
from fsdpctl.predict.network import Group
from fsdpctl.predict.recorder import RankGroup
from fsdpctl.predict.simulator import SimulatedStep, StepSimulator
from fsdpctl.predict.task_recorder import Machine, TaskRecorder
from fsdpctl.resolve.loss_chunks import loss_chunk_tokens
from fsdpctl.resolve.machine import world_size


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """The predicted time of a step that is not the first, in seconds."""

    seconds: float
    compute: float
    optimizer: float
    exposed_communication: float
    sent: Mapping[str, float]  # bytes that a rank sends, by link
    simulated: SimulatedStep
    tokens: int  # of all ranks

    def extended(self, before: "StepPrediction", more: int) -> "StepPrediction":
        """Add `more` passes, each as long as this step is longer than `before`."""

        def grown(now: float, then: float) -> float:
            return now + more * (now - then)

        return replace(
            self,
            seconds=grown(self.seconds, before.seconds),
            compute=grown(self.compute, before.compute),
            exposed_communication=grown(self.exposed_communication, before.exposed_communication),
            sent={link: grown(n, before.sent.get(link, 0.0)) for link, n in self.sent.items()},
        )


class StepPredictor:
    """Predicts configurations; the traces of its estimator are shared by like ones."""

    def __init__(self, estimator: Estimator | None = None) -> None:
        self._estimator = estimator or Estimator()

    def predict(self, config: Config) -> StepPrediction:
        """Predict one training step of a placed configuration.

        Raises:
            UsageError: If its hardware specs are incomplete.
        """
        traced = self._estimator.traced_model(config)
        batches = batches_of(config)
        micro = batches.micro_batch_size
        program = traced.program(micro, config.train.seq_len, loss_chunk_tokens(config, micro))
        passes = batches.num_micro_batches
        shown = _simulate(config, traced, program, min(passes, _SIMULATED))
        if passes > _SIMULATED:
            before = _simulate(config, traced, program, _SIMULATED - 1)
            shown = shown.extended(before, passes - _SIMULATED)
        return replace(shown, tokens=batches.global_batch_size * config.train.seq_len)


_SIMULATED = 3  # passes: another one takes as long as the second to last


def _simulate(config: Config, traced: TracedModel, program: Program, passes: int) -> StepPrediction:
    plan, place = plan_run(config, traced.units, passes)
    recorder = TaskRecorder(program.work, _machine(config, place))
    strategy = get_strategy(config.strategy.name)
    steps = steps_of(config.engine.name, strategy, traced.units, plan, place, recorder)
    simulator = StepSimulator()
    for _ in range(2):  # collectives that the first leaves in flight end in the second
        steps.step()
        step = simulator.run(recorder.take())
    return StepPrediction(
        seconds=step.seconds,
        compute=step.computing["compute"],
        optimizer=step.computing["optimizer"],
        exposed_communication=step.exposed,
        sent=dict(step.sent),
        simulated=step,
        tokens=0,
    )


def _machine(config: Config, place: RankPlace) -> Machine:
    ranks, nodes = world_size(config), config.launch.nnodes
    size, on_node = place.size, ranks // nodes
    replicas = place.num_replicas
    groups = {
        RankGroup.SHARD: Group(size, -(-size // on_node)),
        RankGroup.REPLICAS: Group(replicas, replicas if size >= on_node else nodes),
        RankGroup.WORLD: Group(ranks, nodes),
    }
    return Machine(device_of(config), network_of(config), groups)
