"""How long a step of a configuration takes, on hardware that is described or was measured."""

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
from fsdpctl.predict.player import Played, Player
from fsdpctl.predict.recorder import RankGroup
from fsdpctl.predict.task_recorder import Machine, TaskRecorder
from fsdpctl.resolve.loss_chunks import loss_chunk_tokens
from fsdpctl.resolve.machine import world_size


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A step like all that follow."""

    seconds: float
    compute: float
    optimizer: float
    exposed_communication: float
    sent: Mapping[str, float]  # bytes of a rank, by link
    played: Played  # its course
    tokens: int  # of all ranks


class Foresight:
    """Foresees configurations; what was observed of a model serves all that compute alike."""

    def __init__(self, estimator: Estimator | None = None) -> None:
        self._estimator = estimator or Estimator()

    def step(self, config: Config) -> Foreseen:
        """Of a configuration that is placed.

        Raises:
            UsageError: too little is known of its hardware.
        """
        traced = self._estimator.traced_model(config)
        batches = batches_of(config)
        micro = batches.micro_batch_size
        program = traced.program(micro, config.train.seq_len, loss_chunk_tokens(config, micro))
        tokens = batches.global_batch_size * config.train.seq_len
        passes = batches.num_micro_batches
        shown = _simulated(config, traced, program, min(passes, _SHOWN))
        if passes > _SHOWN:
            before = _simulated(config, traced, program, _SHOWN - 1)
            shown = _extended(shown, before, passes - _SHOWN)
        return replace(shown, tokens=tokens)


_SHOWN = 3  # passes, of which one more takes as long as the last but one


def _extended(shown: Foreseen, before: Foreseen, more: int) -> Foreseen:
    """With so many passes more, each as long as `shown` is longer than `before`."""

    def grown(now: float, then: float) -> float:
        return now + more * (now - then)

    return replace(
        shown,
        seconds=grown(shown.seconds, before.seconds),
        compute=grown(shown.compute, before.compute),
        exposed_communication=grown(shown.exposed_communication, before.exposed_communication),
        sent={
            link: grown(nbytes, before.sent.get(link, 0.0)) for link, nbytes in shown.sent.items()
        },
    )


def _simulated(config: Config, traced: TracedModel, program: Program, passes: int) -> Foreseen:
    plan, place = plan_run(config, traced.units, passes)
    recorder = TaskRecorder(program.work, _machine(config, place))
    strategy = get_strategy(config.strategy.name)
    steps = steps_of(config.engine.name, strategy, traced.units, plan, place, recorder)
    player = Player()
    for _ in range(2):  # collectives that the first leaves in flight end in the second
        steps.step()
        played = player.play(recorder.take())
    return Foreseen(
        seconds=played.seconds,
        compute=played.computing["compute"],
        optimizer=played.computing["optimizer"],
        exposed_communication=played.waiting,
        sent=dict(played.sent),
        played=played,
        tokens=0,
    )


def _machine(config: Config, place: RankPlace) -> Machine:
    ranks, nodes = world_size(config), config.launch.nnodes
    size, on_node = place.size, ranks // nodes
    shard = Group(size, -(-size // on_node))
    copies = Group(place.num_replicas, place.num_replicas if size >= on_node else nodes)
    groups = {
        RankGroup.SHARD: shard,
        RankGroup.REPLICAS: copies,
        RankGroup.WORLD: Group(ranks, nodes),
    }
    return Machine(device_of(config), network_of(config), groups)
