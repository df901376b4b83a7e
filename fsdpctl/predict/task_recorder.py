"""Records a training step as tasks, priced on a device and a network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdpctl.plan.transport import ALL_REDUCED_TOGETHER
from fsdpctl.predict.compute import Part, PassPosition, Work
from fsdpctl.predict.hardware import DataSheet
from fsdpctl.predict.network import CollectiveKind, Group, RingNetwork
from fsdpctl.predict.profile import MeasuredDevice, MeasuredNetwork
from fsdpctl.predict.recorder import GATHERS, RankGroup, Recorder
from fsdpctl.predict.simulator import Compute, Start, Task, Wait

RECORD_BYTES = 64  # of the statistics that ranks exchange after a backward


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware of a rank, and its process groups."""

    device: DataSheet | MeasuredDevice
    network: RingNetwork | MeasuredNetwork
    groups: Mapping[RankGroup, Group]


class TaskRecorder(Recorder):
    """The tasks of one rank; all ranks have the same."""

    def __init__(self, works: Mapping[PassPosition, Sequence[Work]], machine: Machine) -> None:
        self._machine = machine
        self._tasks: list[Task] = []
        self._works = works
        self._seconds: dict[int, float] = {}  # by sequence of operators, which like units share
        self._next = 0
        self._held: list[Start] = []
        self._held_bytes = 0.0

    def take(self) -> list[Task]:
        """Return the tasks recorded since the previous call."""
        taken, self._tasks = self._tasks, []
        return taken

    def compute(self, part: Part, unit: str = "") -> None:
        """Run the operators of a part, no faster than the host issues them."""
        works = self._works.get(PassPosition(part, unit), ())
        if id(works) not in self._seconds:
            device = self._machine.device
            computing = sum(map(device.seconds, works))
            self._seconds[id(works)] = max(computing, len(works) * device.host_seconds)
        self._spend(self._seconds[id(works)], f"{part} {unit}".strip())

    def copy(self, nbytes: float, label: str) -> None:
        """Read and write `nbytes` in total."""
        self._copy(nbytes, label)

    def start(
        self,
        kind: CollectiveKind,
        nbytes: float,
        group: RankGroup,
        label: str,
        *,
        queue: str,
        after: int | None = None,
        is_held: bool = False,
    ) -> int:
        """Start a collective.

        A held one starts together with others, once they have many bytes or one is waited for.
        """
        self._next += 1
        transfer = self._machine.network.transfer(kind, nbytes, self._machine.groups[group])
        started = Start(self._next, queue, transfer, label, after)
        if not is_held:
            self._tasks.append(started)
            return self._next
        self._held.append(started)
        self._held_bytes += nbytes
        if self._held_bytes >= ALL_REDUCED_TOGETHER:
            self._start_held()
        return self._next

    def wait(self, key: int | None) -> None:
        """Let the compute stream wait for a collective."""
        if key is not None:
            if any(each.key == key for each in self._held):
                self._start_held()
            self._tasks.append(Wait(key))

    def optimize(self, numel: float, itemsize: int, moments: int) -> None:
        """Compute the gradient norm, exchange statistics, and update the elements."""
        self._copy(numel * itemsize, "norm of the gradients", "optimizer")
        if self._machine.groups[RankGroup.WORLD].ranks > 1:
            kind, world = CollectiveKind.ALL_REDUCE, RankGroup.WORLD
            self.wait(self.start(kind, RECORD_BYTES, world, "record", queue=GATHERS))
        seconds = self._machine.device.optimizer_seconds(numel * itemsize, moments)
        self._spend(seconds, "optimizer", "optimizer")

    def end_step(self) -> None:
        """Add the time of a step that no operator accounts for."""
        self._spend(self._machine.device.step_overhead, "between steps")

    def _start_held(self) -> None:
        self._tasks += self._held
        self._held, self._held_bytes = [], 0.0

    def _copy(self, nbytes: float, label: str, phase: str = "compute") -> None:
        if nbytes > 0:
            self._spend(self._machine.device.copy_seconds(nbytes), label, phase)

    def _spend(self, seconds: float, label: str, phase: str = "compute") -> None:
        if seconds > 0:
            self._tasks.append(Compute(seconds, label, phase))
