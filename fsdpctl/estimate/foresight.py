"""How long a step of a configuration takes, on hardware that is described or was measured."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from fsdpctl.config.schema import Config
from fsdpctl.estimate.estimator import Estimator, batches_of
from fsdpctl.estimate.hardware import device_of, network_of
from fsdpctl.estimate.run_plan import kept_states, plan_run
from fsdpctl.estimate.traced import TracedModel
from fsdpctl.plan.engines import FSDP2, OURS
from fsdpctl.plan.sizes import RankPlace
from fsdpctl.plan.units import UnitSpec, unit_order
from fsdpctl.predict.compute import Program
from fsdpctl.predict.engine_bytes import TrainingPlan, held_masters, planned_step, planned_update
from fsdpctl.predict.network import Group
from fsdpctl.predict.own_time import OwnStep, OwnTasks
from fsdpctl.predict.peers_time import DataParallelTasks, FullyShardTasks, PeerStep
from fsdpctl.predict.player import Played, Player
from fsdpctl.predict.tasks import Task
from fsdpctl.predict.writer import Machine, TaskWriter, Works
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
    works: Works = {(part.value, unit): work for (part, unit), work in program.work.items()}
    plan, place = plan_run(config, traced.units, passes)
    writer = TaskWriter(works, _machine(config, place))
    tasks = _tasks(config, traced.units, writer, plan, place)
    player = Player()
    player.play(tasks.step())  # what it leaves to be waited for belongs to the next
    played = player.play(tasks.step())
    return Foreseen(
        seconds=played.seconds,
        compute=played.computing["compute"],
        optimizer=played.computing["optimizer"],
        exposed_communication=played.waiting,
        sent=dict(played.sent),
        played=played,
        tokens=0,
    )


class _Tasks(Protocol):
    """A step of some engine."""

    def step(self) -> list[Task]:
        """What a rank does."""
        ...


def _tasks(
    config: Config,
    units: tuple[UnitSpec, ...],
    writer: TaskWriter,
    plan: TrainingPlan,
    place: RankPlace,
) -> _Tasks:
    if config.engine.name != OURS:
        return _tasks_of_peer(config, units, writer, plan)
    owned = sum(
        held_masters(plan, place, layout).numel
        for of_unit in plan.layouts.values()
        for layout in of_unit
        if layout.trainable
    )
    step = OwnStep(
        order=plan.order,
        strategy=plan.strategy,
        sizes=plan.sizes,
        events=planned_step(plan, place),
        update=planned_update(plan, place),
        transport=place.transport,
        owned=owned,
        moments=kept_states(config).moments,
    )
    return OwnTasks(step, writer)


def _tasks_of_peer(
    config: Config, units: tuple[UnitSpec, ...], writer: TaskWriter, plan: TrainingPlan
) -> _Tasks:
    root, *others = units
    numel = {unit.name: sum(param.numel for param in unit.params) for unit in units}
    if config.engine.name == FSDP2:
        blocks = {unit.name for unit in others if unit.kind == "block"}
        rest = sum(count for name, count in numel.items() if name not in blocks)
        numel = {root.name: rest, **{name: numel[name] for name in numel if name in blocks}}
    step = PeerStep(
        root=root.name,
        units=unit_order(units).forward,
        numel=numel,
        sizes=plan.sizes,
        reduces=plan.reduces,
        reshards=plan.strategy.reshard_after_forward,
        overlaps=config.launch.device == "cuda",
        moments=kept_states(config).moments,
    )
    return (
        FullyShardTasks(step, writer)
        if config.engine.name == FSDP2
        else DataParallelTasks(step, writer)
    )


def _machine(config: Config, place: RankPlace) -> Machine:
    ranks, nodes = world_size(config), config.launch.nnodes
    size, on_node = place.size, ranks // nodes
    shard = Group(size, -(-size // on_node))
    copies = Group(place.num_replicas, place.num_replicas if size >= on_node else nodes)
    return Machine(device_of(config), network_of(config), shard, copies, Group(ranks, nodes))
