"""The interface between the description of a training step and what it costs."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Protocol

from fsdpctl.plan.layout import ParamSpec
from fsdpctl.plan.schedule import Buffer
from fsdpctl.predict.compute import Part, PassPosition, Program, Work, WorkKind
from fsdpctl.predict.hardware import (
    CollectiveKind,
    DataSheet,
    Group,
    HostQueue,
    HostSheet,
    RingNetwork,
)
from fsdpctl.predict.simulator import Compute, Start, Task, Transfer, Wait

# Queues of collectives.
GATHERS, REDUCTIONS, COPIES = "gathers", "reductions", "sums over replicas"
_EXCHANGES = "all-to-alls of attention"


class Category(StrEnum):
    """The purpose of memory."""

    PARAMETERS = "parameters"  # at rest: master weights, and parts to be gathered in another dtype
    GRADIENTS = "gradients"  # reduced, or as autograd made them
    OPTIMIZER_STATES = "optimizer_states"
    GATHERED_UNITS = "gathered_units"  # parameters to compute with
    REDUCE_BUFFERS = "reduce_buffers"
    ACTIVATIONS = "activations"
    LOGITS_AND_LOSS = "logits_and_loss"
    WORKSPACES = "workspaces"  # of kernels


CATEGORY_OF = dict.fromkeys(Buffer, Category.REDUCE_BUFFERS) | {
    Buffer.PARAMS: Category.GATHERED_UNITS,
    Buffer.GRADS: Category.GRADIENTS,
    Buffer.LEAVING: Category.GRADIENTS,
}


class RankGroup(StrEnum):
    """The ranks that take part in a collective."""

    SHARD = "shard"  # they share one replica of the model
    REPLICAS = "replicas"  # they hold the same part of different replicas
    WORLD = "world"
    CONTEXT = "context"  # they share each sample


class Recorder:
    """Receives what a rank does in a training step, and ignores it.

    Each engine describes its step once. Memory, time and traffic are recorders that override the
    methods that concern them. Sizes are in bytes.
    """

    def compute(self, part: Part, unit: str = "") -> None:
        """Run a part of a forward-backward pass."""

    def has_gradient(self, param: ParamSpec) -> bool:
        """Return whether backward makes a gradient of a parameter."""
        return param.trainable

    # ---- memory, in the order in which the host requests it ------------------------------

    def at(self, doing: str, unit: str = "") -> None:
        """Name the moment of the step that begins."""

    def allocate(
        self, category: Category, unit: str, what: str, nbytes: int, *, stream: int = 0
    ) -> int:
        """Allocate memory on a stream and return the key that frees it."""
        return 0

    def free(self, *keys: int | None) -> None:
        """Free memory by its keys, if there are any."""

    def become(self, key: int, category: Category, what: str) -> None:
        """Change the purpose of allocated memory."""

    def pass_through(self, nbytes: int) -> None:
        """Allocate memory and free it at once."""

    def gradient(self, param: str) -> int | None:
        """Return the key of the gradient that autograd made of a parameter in this pass."""
        return None

    def keep(self, key: int) -> None:
        """Let a gradient of autograd outlive its pass."""

    # ---- time, in the order in which the device executes it ------------------------------

    def copy(self, nbytes: float, label: str) -> None:
        """Read and write `nbytes` in total on the compute stream."""

    def start(
        self,
        kind: CollectiveKind,
        nbytes: float,
        group: RankGroup,
        label: str,
        *,
        queue: str,
        after: tuple[int, ...] = (),
    ) -> int:
        """Start a collective over a buffer of `nbytes` and return the key to wait for.

        Collectives of one `queue` run one after another. This one starts after those with the keys
        `after` have ended.
        """
        return 0

    def on_host(
        self, queue: HostQueue, nbytes: float, label: str, *, after: tuple[int, ...] = ()
    ) -> int:
        """Start a copy of `nbytes`, or a step of the host that moves as many; return its key.

        Like a collective, it runs behind others of its queue and those with the keys `after`.
        """
        return 0

    def wait(self, key: int | None, phase: str | None = None) -> None:
        """Let the compute stream wait, if there is a key; `phase` as in `simulator.Wait`."""

    def norm(self, nbytes: float) -> None:
        """Compute the norm of gradients of `nbytes`, and exchange it with other ranks."""

    def optimize(self, numel: float, itemsize: int, moments: int, stored: float = 0) -> None:
        """Compute the gradient norm and update `numel` elements with `moments` per element.

        A step in tiles reads and writes `stored` bytes of gradients, weights and states.
        """

    def update(self, works: Sequence[Work], label: str) -> None:
        """Run operators of the optimizer's step."""

    def end_step(self) -> None:
        """Account for the time between two steps."""


class Steps(Protocol):
    """The steps of a rank under some engine; the state carries over from one to the next."""

    def setup(self, *, draws: bool) -> None:
        """Build the model; `draws`: initialize its values on the device, one unit at a time."""

    def step(self) -> None:
        """Run all forward-backward passes, the reductions and the optimizer."""


class TrafficRecorder(Recorder):
    """Sums the bytes of collectives by their kind and group."""

    def __init__(self) -> None:
        self.nbytes: dict[tuple[CollectiveKind, RankGroup], float] = defaultdict(float)

    def start(
        self, kind: CollectiveKind, nbytes: float, group: RankGroup, label: str, **_: object
    ) -> int:
        self.nbytes[kind, group] += nbytes
        return 0

    def sent(self, group: RankGroup, ranks: int) -> float:
        """Return the bytes that one of `ranks` ranks sends to its group.

        In a ring of n ranks, each sends (n - 1) / n of a tensor that is gathered or
        reduce-scattered, and twice that of one that is all-reduced. Direct exchanges and broadcasts
        of all parts average the same over the ranks.
        """
        total = sum(
            nbytes * (2 if kind is CollectiveKind.ALL_REDUCE else 1)
            for (kind, among), nbytes in self.nbytes.items()
            if among is group
        )
        return total * (ranks - 1) / ranks


RECORD_BYTES = 64  # of the statistics that ranks exchange after a backward


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware of a rank, and its process groups."""

    device: DataSheet
    network: RingNetwork
    host: HostSheet
    groups: Mapping[RankGroup, Group]


class TaskRecorder(Recorder):
    """The tasks of one rank that runs a program; all ranks have the same.

    An input of a block that rests on the host leaves while its block runs, and returns while the
    block after it is recomputed.
    """

    def __init__(self, program: Program, machine: Machine) -> None:
        self._machine = machine
        self._tasks: list[Task] = []
        self._works, self._sent = program.work, program.sent
        self._ahead = {after: unit for unit, after in pairwise(program.units)}
        self._moving: dict[str, int] = {}  # keys of copies of inputs, by unit
        self._computing: dict[int, float] = {}  # by sequence of operators, which like units share
        self._next = 0

    def take(self) -> list[Task]:
        taken, self._tasks = self._tasks, []
        return taken

    def compute(self, part: Part, unit: str = "") -> None:
        if part is Part.FORWARD:
            self._start_copy(HostQueue.DOWN, unit)
        elif part is Part.BACKWARD:
            self._start_copy(HostQueue.UP, unit)  # unless it is on its way
            self._end_copy(unit)
            self._start_copy(HostQueue.UP, self._ahead.get(unit, ""))
        self._run(part, unit)
        if part is Part.FORWARD:
            self._end_copy(unit)

    def _start_copy(self, queue: HostQueue, unit: str) -> None:
        if unit in self._sent and unit not in self._moving:
            self._moving[unit] = self.on_host(queue, self._sent[unit], f"input of {unit}")

    def _end_copy(self, unit: str) -> None:
        self.wait(self._moving.pop(unit, None))

    def _run(self, part: Part, unit: str) -> None:
        """Run operators, no faster than the host issues them."""
        works, device = self._works.get(PassPosition(part, unit), ()), self._machine.device
        if id(works) not in self._computing:
            computed = [each for each in works if each.kind is not WorkKind.EXCHANGE]
            self._computing[id(works)] = sum(map(device.seconds, computed))
        computing, issuing = self._computing[id(works)], len(works) * device.host_seconds
        if part in (Part.FORWARD, Part.BACKWARD):
            issuing += device.unit_seconds
        label = f"{part} {unit}".strip()
        self._spend(max(computing, issuing), label)
        for each in works:
            if each.kind is WorkKind.EXCHANGE:
                # Each rank sends as much as it does of a gathered tensor of this size.
                about = (CollectiveKind.GATHER, each.nbytes, RankGroup.CONTEXT)
                self.wait(self.start(*about, f"all-to-all of {label}", queue=_EXCHANGES))

    def copy(self, nbytes: float, label: str, phase: str = "compute") -> None:
        if nbytes > 0:
            self._spend(self._machine.device.copy_seconds(nbytes), label, phase)

    def start(
        self,
        kind: CollectiveKind,
        nbytes: float,
        group: RankGroup,
        label: str,
        *,
        queue: str,
        after: tuple[int, ...] = (),
    ) -> int:
        transfer = self._machine.network.transfer(kind, nbytes, self._machine.groups[group])
        return self._start(queue, transfer, label, after)

    def on_host(
        self, queue: HostQueue, nbytes: float, label: str, *, after: tuple[int, ...] = ()
    ) -> int:
        return self._start(queue, self._machine.host.transfer(queue, nbytes), label, after)

    def wait(self, key: int | None, phase: str | None = None) -> None:
        if key is not None:
            self._tasks.append(Wait(key, phase))

    def norm(self, nbytes: float) -> None:
        self.copy(nbytes, "norm of the gradients", "optimizer")
        if self._machine.groups[RankGroup.WORLD].ranks > 1:
            kind, world = CollectiveKind.ALL_REDUCE, RankGroup.WORLD
            self.wait(self.start(kind, RECORD_BYTES, world, "record", queue=GATHERS))

    def optimize(self, numel: float, itemsize: int, moments: int, stored: float = 0) -> None:
        self.norm(numel * itemsize)
        device = self._machine.device
        seconds = device.optimizer_seconds(numel * itemsize, moments)
        if stored:
            seconds = device.tiles_seconds(numel, stored)
        self._spend(seconds, "optimizer", "optimizer")

    def update(self, works: Sequence[Work], label: str) -> None:
        device = self._machine.device
        computing = sum(device.seconds(work) * n for work, n in Counter(works).items())
        self._spend(max(computing, len(works) * device.host_seconds), label, "optimizer")

    def end_step(self) -> None:
        """Add the time of a step that no operator accounts for."""
        self._spend(self._machine.device.step_overhead, "between steps")

    def _start(self, queue: str, transfer: Transfer, label: str, after: tuple[int, ...]) -> int:
        self._next += 1
        self._tasks.append(Start(self._next, queue, transfer, label, after))
        return self._next

    def _spend(self, seconds: float, label: str, phase: str = "compute") -> None:
        if seconds > 0:
            self._tasks.append(Compute(seconds, label, phase))
