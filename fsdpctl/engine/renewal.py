"""Parameters that stay between steps, brought up to date after an optimizer's step."""

from collections.abc import Iterable, Sequence

from fsdpctl.comm.base import Handle
from fsdpctl.comm.mesh import Mesh
from fsdpctl.engine.ledger import Ledger
from fsdpctl.engine.unit import ShardedUnit
from fsdpctl.plan.schedule import EventKind
from fsdpctl.plan.strategy import Strategy


class Renewal:
    """Gathers what other ranks wrote to their masters, unit by unit.

    What is under way is waited for when the unit is gathered, or used where it stays whole; those
    that no forward has called as a module, before any forward.
    """

    def __init__(
        self, units: Sequence[ShardedUnit], strategy: Strategy, mesh: Mesh, ledger: Ledger
    ) -> None:
        self.overlaps = False  # otherwise `start` waits
        self._units = {unit.name: unit for unit in units}
        self._strategy = strategy
        self._mesh = mesh
        self.ledger = ledger
        self._arriving: dict[str, list[Handle]] = {}
        self._uncalled = set(self._units)

    def start(self, *, trained_only: bool) -> None:
        """The masters were written to; `trained_only`: not those of frozen parameters."""
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

    def begin_forward(self) -> None:
        """The outermost module starts."""
        self._finish(self._uncalled)

    def begin_unit(self, name: str) -> None:
        """A unit's module is called."""
        self._uncalled.discard(name)
        self._finish((name,))

    def begin_gather(self, name: str) -> None:
        """A unit is gathered from what stays of it."""
        self._finish((name,))

    def finish(self) -> None:
        """All parameters may be read."""
        self._finish(self._units)

    def _finish(self, names: Iterable[str]) -> None:
        for name in names if self._arriving else ():
            for handle in self._arriving.pop(name, ()):
                handle.wait()
