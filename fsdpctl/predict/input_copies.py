"""The copies of the inputs of recomputed blocks to the host and back."""

from itertools import pairwise

from fsdpctl.predict.compute import Part, Program
from fsdpctl.predict.hardware import HostQueue
from fsdpctl.predict.recorder import Machine, TaskRecorder


class ProgramRecorder(TaskRecorder):
    """The tasks of one rank that runs a program.

    An input leaves while its block runs, and returns while the block after it is recomputed.
    """

    def __init__(self, program: Program, machine: Machine) -> None:
        super().__init__(program.work, machine)
        self._sent = program.sent
        self._ahead = {
            after: unit for unit, after in pairwise(program.units) if unit in program.sent
        }
        self._moving: dict[str, int] = {}  # keys of copies, by unit

    def compute(self, part: Part, unit: str = "") -> None:
        """Run the operators of a part, and the copies of inputs."""
        if part is Part.FORWARD:
            self._start_copy(HostQueue.DOWN, unit)
        elif part is Part.BACKWARD:
            self._start_copy(HostQueue.UP, unit)  # unless it is on its way
            self._end_copy(unit)
            self._start_copy(HostQueue.UP, self._ahead.get(unit, ""))
        super().compute(part, unit)
        if part is Part.FORWARD:
            self._end_copy(unit)

    def _start_copy(self, queue: HostQueue, unit: str) -> None:
        if unit in self._sent and unit not in self._moving:
            self._moving[unit] = self.on_host(queue, self._sent[unit], f"input of {unit}")

    def _end_copy(self, unit: str) -> None:
        self.wait(self._moving.pop(unit, None))
