"""Records a training step as the tasks of one rank, which `predict.simulator` runs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fsdpctl.predict.hardware import (
    CollectiveKind,
    DeviceDataSheet,
    GroupShape,
    HostDataSheet,
    HostQueue,
    RingNetwork,
)
from fsdpctl.predict.model_pass import ModelPass, PassPart, PassPosition, Work, WorkKind
from fsdpctl.predict.simulator import Compute, Start, Task, Transfer, Wait
from fsdpctl.predict.step_recorder import GATHERS, RankGroup, StepRecorder, TransferKeys

_EXCHANGES = "all-to-alls of attention"  # a queue
STATISTICS_BYTES = 64  # statistics of a step that all ranks reduce after backward


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware of a rank, and its process groups."""

    device: DeviceDataSheet
    network: RingNetwork
    host: HostDataSheet
    groups: Mapping[RankGroup, GroupShape]


class TaskRecorder(StepRecorder):
    """A recorder of the tasks of a rank; all ranks have the same tasks.

    An offloaded input of a block is copied to the host during the block's forward, and back while
    the next block is recomputed.
    """

    def __init__(self, model_pass: ModelPass, machine: Machine) -> None:
        self._machine = machine
        self._tasks: list[Task] = []
        self._works, self._offloaded = model_pass.work, model_pass.offloaded
        self._previous = {following: unit for unit, following in pairwise(model_pass.units)}
        self._copies: dict[str, int] = {}  # keys of copies of inputs, by unit
        # By the id of a sequence of operators, which the pass keeps alive and equal units share.
        self._device_seconds: dict[int, float] = {}
        self._last_key = 0

    def take(self) -> list[Task]:
        """Return the tasks since the last call."""
        tasks, self._tasks = self._tasks, []
        return tasks

    def compute(self, part: PassPart, unit: str = "") -> None:
        if part is PassPart.FORWARD:
            self._start_copy(HostQueue.DOWN, unit)
        elif part is PassPart.BACKWARD:
            self._start_copy(HostQueue.UP, unit)  # no effect if the copy has started
            self.wait(self._copies.pop(unit, None))
            self._start_copy(HostQueue.UP, self._previous.get(unit, ""))
        self._run(part, unit)
        if part is PassPart.FORWARD:
            self.wait(self._copies.pop(unit, None))

    def _start_copy(self, queue: HostQueue, unit: str) -> None:
        if unit in self._offloaded and unit not in self._copies:
            self._copies[unit] = self.start_host(queue, self._offloaded[unit], f"input of {unit}")

    def _run(self, part: PassPart, unit: str) -> None:
        """Record the operators of a part; they run no faster than the host issues them."""
        works, device = self._works.get(PassPosition(part, unit), ()), self._machine.device
        if id(works) not in self._device_seconds:
            computed = [each for each in works if each.kind is not WorkKind.EXCHANGE]
            self._device_seconds[id(works)] = sum(map(device.seconds, computed))
        issuing = len(works) * device.host_seconds
        if part in (PassPart.FORWARD, PassPart.BACKWARD):
            issuing += device.unit_seconds
        label = f"{part} {unit}".strip()
        self._spend(max(self._device_seconds[id(works)], issuing), label)
        for each in (work for work in works if work.kind is WorkKind.EXCHANGE):
            # In an all-to-all, a rank sends as much as in an all-gather of this size.
            exchange = (CollectiveKind.GATHER, each.nbytes, RankGroup.CONTEXT)
            self.wait(self.start_collective(*exchange, f"all-to-all of {label}", queue=_EXCHANGES))

    def copy(self, nbytes: float, label: str, phase: str = "compute") -> None:
        if nbytes > 0:
            self._spend(self._machine.device.copy_seconds(nbytes), label, phase)

    def start_collective(
        self,
        kind: CollectiveKind,
        nbytes: float,
        group: RankGroup,
        label: str,
        *,
        queue: str,
        after: TransferKeys = (),
    ) -> int:
        transfer = self._machine.network.transfer(kind, nbytes, self._machine.groups[group])
        return self._start(queue, transfer, label, after)

    def start_host(
        self, queue: HostQueue, nbytes: float, label: str, *, after: TransferKeys = ()
    ) -> int:
        return self._start(queue, self._machine.host.transfer(queue, nbytes), label, after)

    def wait(self, key: int | None, phase: str | None = None) -> None:
        if key is not None:
            self._tasks.append(Wait(key, phase))

    def gradient_norm(self, nbytes: float) -> None:
        self.copy(nbytes, "norm of the gradients", "optimizer")
        if self._machine.groups[RankGroup.WORLD].ranks > 1:
            kind, world = CollectiveKind.ALL_REDUCE, RankGroup.WORLD
            label = "statistics"
            self.wait(self.start_collective(kind, STATISTICS_BYTES, world, label, queue=GATHERS))

    def optimizer_step(self, numel: float, itemsize: int, moments: int, traffic: float = 0) -> None:
        self.gradient_norm(numel * itemsize)
        device = self._machine.device
        seconds = device.optimizer_seconds(numel * itemsize, moments)
        if traffic:
            seconds = device.tiles_seconds(numel, traffic)
        self._spend(seconds, "optimizer", "optimizer")

    def optimizer_operators(self, works: Sequence[Work], label: str) -> None:
        device = self._machine.device
        computing = sum(device.seconds(work) * n for work, n in Counter(works).items())
        self._spend(max(computing, len(works) * device.host_seconds), label, "optimizer")

    def end_step(self) -> None:
        self._spend(self._machine.device.step_overhead, "between steps")

    def _start(self, queue: str, transfer: Transfer, label: str, after: TransferKeys) -> int:
        self._last_key += 1
        self._tasks.append(Start(self._last_key, queue, transfer, label, after))
        return self._last_key

    def _spend(self, seconds: float, label: str, phase: str = "compute") -> None:
        if seconds > 0:
            self._tasks.append(Compute(seconds, label, phase))
