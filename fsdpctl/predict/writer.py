"""Writes down tasks, priced on a device and a network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdpctl.plan.transport import ALL_REDUCED_TOGETHER
from fsdpctl.plan.work import Work
from fsdpctl.predict.hardware import Device
from fsdpctl.predict.network import CollectiveKind, Group, Network
from fsdpctl.predict.tasks import Compute, Start, Task, Wait

GATHERS, REDUCTIONS, COPIES = "gathers", "reductions", "sums over copies"
RECORD_BYTES = 64  # of what ranks tell each other after a backward

# What is computed in each part of a pass, by the part's name and that of the unit it belongs to.
Works = Mapping[tuple[str, str], Sequence[Work]]


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a rank computes, and with whom."""

    device: Device
    network: Network
    shard: Group  # that shares a copy
    copies: Group  # that holds the same part
    world: Group


class TaskWriter:
    """Tasks of one rank; all ranks have the same."""

    def __init__(self, works: Works, machine: Machine) -> None:
        self.machine = machine
        self.tasks: list[Task] = []
        self._works = works
        self._seconds: dict[int, float] = {}  # of works, which alike units share
        self._next = 0
        self._held: list[Start] = []
        self._held_bytes = 0.0

    def take(self) -> list[Task]:
        """What was written since the last time."""
        taken, self.tasks = self.tasks, []
        return taken

    def compute(self, part: str, unit: str = "", *, beside: float = 0.0) -> None:
        """A part of a pass, and so many seconds more."""
        works = self._works.get((part, unit), ())
        if id(works) not in self._seconds:
            device = self.machine.device
            computing = sum(map(device.seconds, works))
            self._seconds[id(works)] = max(computing, len(works) * device.issuing)
        self.spend(self._seconds[id(works)] + beside, f"{part} {unit}".strip())

    def spend(self, seconds: float, label: str, *, phase: str = "compute") -> None:
        """Compute something else."""
        if seconds > 0:
            self.tasks.append(Compute(seconds, label, phase))

    def copy(self, nbytes: float, label: str, *, phase: str = "compute") -> None:
        """Read and write so many bytes together."""
        if nbytes > 0:
            self.spend(self.machine.device.copying(nbytes), label, phase=phase)

    def start(
        self,
        kind: CollectiveKind,
        nbytes: float,
        group: Group,
        label: str,
        *,
        queue: str,
        after: int | None = None,
        is_held: bool = False,
    ) -> int:
        """Start a collective over a buffer of so many bytes; returns what to wait for.

        One that is held begins with others, as soon as they are many bytes or one is waited for.
        """
        self._next += 1
        transfer = self.machine.network.transfer(kind, nbytes, group)
        started = Start(self._next, queue, transfer, label, after)
        if not is_held:
            self.tasks.append(started)
            return self._next
        self._held.append(started)
        self._held_bytes += nbytes
        if self._held_bytes >= ALL_REDUCED_TOGETHER:
            self._begin_held()
        return self._next

    def wait(self, key: int | None) -> None:
        """Until that collective is over."""
        if key is not None:
            if any(each.key == key for each in self._held):
                self._begin_held()
            self.tasks.append(Wait(key))

    def _begin_held(self) -> None:
        self.tasks += self._held
        self._held, self._held_bytes = [], 0.0

    def step_over(self, numel: float, itemsize: int, moments: int) -> None:
        """The norm of `numel` gradients, what ranks say of them, and the optimizer's step."""
        self.copy(numel * itemsize, "norm of the gradients", phase="optimizer")
        if self.machine.world.ranks > 1:
            kind = CollectiveKind.ALL_REDUCE
            self.wait(self.start(kind, RECORD_BYTES, self.machine.world, "record", queue=GATHERS))
        seconds = self.machine.device.stepping(numel * itemsize, moments)
        self.spend(seconds, "optimizer", phase="optimizer")
