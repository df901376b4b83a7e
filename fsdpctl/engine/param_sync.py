"""Parameters that remain between steps, and what other ranks make of them in a step."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor

from fsdpctl.comm.base import Handle
from fsdpctl.comm.collectives import Mesh
from fsdpctl.comm.host import Job
from fsdpctl.engine.ledger import Ledger
from fsdpctl.engine.unit import ShardedUnit
from fsdpctl.plan.schedule import Buffer, EventKind
from fsdpctl.plan.strategy import Strategy


class ParamSync:
    """Gathers what other ranks wrote to their master weights, unit by unit, after a step.

    Only for parameters that remain between steps. A unit's update is waited for when the unit is
    gathered, or used if it stays unsharded. Units that no forward has called as a module wait at
    the beginning of a forward.
    """

    def __init__(
        self, units: Sequence[ShardedUnit], strategy: Strategy, mesh: Mesh, ledger: Ledger
    ) -> None:
        self.overlaps = False  # otherwise `start` waits
        self.ledger = ledger
        self._units = {unit.name: unit for unit in units}
        self._strategy = strategy
        self._mesh = mesh
        self._arriving: dict[str, list[Handle]] = {}
        self._uncalled = set(self._units)

    def start(self, *, trained_only: bool) -> None:
        """Send changed master weights to other ranks; `trained_only`: frozen ones are unchanged."""
        self.finish()
        for unit in self._units.values():
            unit.masters_changed()
            buffers = unit.trained_buffers if trained_only else unit.buffers
            self._arriving[unit.name] = [
                handle for buffer in buffers if (handle := buffer.start_sync(self._mesh))
            ]
            if self._strategy.renews_params and buffers:
                nbytes = sum(each.resting.values.nbytes for each in buffers if each.resting)
                self.ledger.note(EventKind.SYNC, unit.name, nbytes)
        if not self.overlaps:
            self.finish()

    def start_after(self, jobs: Mapping[str, tuple[Job, list[list[Tensor]]]]) -> None:
        """Send the master weights of units once the host has stepped them.

        Each has a job, and gradients on the device that are dropped after it.
        """
        for name, (job, gradients) in jobs.items():
            unit = self._units[name]
            unit.masters_changed()
            for number, each in enumerate(gradients):
                self.ledger.free(Buffer.GRADS, name, number)
                if each:
                    self.ledger.allocate(Buffer.LEAVING, name, number, each[0].nbytes)
            self._arriving[name] = [Handle(partial(self._stepped, unit, job, gradients))]
        if not (self.overlaps or self._strategy.shards_params):
            self.finish()

    def _stepped(self, unit: ShardedUnit, job: Job, gradients: list[list[Tensor]]) -> Tensor:
        """Wait until the host has stepped a unit, and send the result to other ranks."""
        job.wait()
        for number, each in enumerate(gradients):
            each.clear()
            self.ledger.free(Buffer.LEAVING, unit.name, number)
        for buffer in unit.trained_buffers:
            handle = buffer.start_sync(self._mesh, is_sent=True)
            if handle is not None:
                handle.wait()
        if self._strategy.renews_params:
            nbytes = sum(
                each.resting.values.nbytes for each in unit.trained_buffers if each.resting
            )
            self.ledger.note(EventKind.SYNC, unit.name, nbytes)
        return unit.trained_buffers[0].part

    def begin_forward(self) -> None:
        """Wait for the units that no forward calls as a module, in the same order on all ranks."""
        self._finish([name for name in self._units if name in self._uncalled])

    def begin_unit(self, name: str) -> None:
        """Wait for a unit whose module is called."""
        self._uncalled.discard(name)
        self._finish((name,))

    def begin_gather(self, name: str) -> None:
        """Wait for a unit that is about to be gathered."""
        self._finish((name,))

    def finish(self) -> None:
        """Wait for all units."""
        self._finish(self._units)

    def _finish(self, names: Iterable[str]) -> None:
        for name in names if self._arriving else ():
            for handle in self._arriving.pop(name, ()):
                handle.wait()
