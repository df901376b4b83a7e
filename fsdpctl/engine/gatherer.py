"""Gathering and releasing of units, within the memory that the plan gives them."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor

from fsdpctl.comm.base import Handle
from fsdpctl.comm.collectives import Mesh
from fsdpctl.comm.host import Job
from fsdpctl.engine.host_params import HostParams
from fsdpctl.engine.ledger import Ledger
from fsdpctl.engine.unit import ShardedUnit, State
from fsdpctl.errors import EngineError
from fsdpctl.plan.schedule import Buffer, EventKind
from fsdpctl.plan.strategy import Strategy

_FINGERPRINTS = 1 << 36  # number of values; sums over 100,000 ranks are exact in float64


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


class Gatherer:
    """Gathers and releases units. A unit that needs a slot in use evicts the slot's owner."""

    def __init__(
        self, units: Sequence[ShardedUnit], strategy: Strategy, mesh: Mesh, param_sync: ParamSync
    ) -> None:
        self.host: HostParams | None = None  # has the parameters that rest in host memory
        self.fingerprint = 0  # of the units gathered since the last comparison, in order
        self._units = {unit.name: unit for unit in units}
        self._numbers = {name: number for number, name in enumerate(self._units, start=1)}
        self._strategy = strategy
        self._mesh = mesh
        self._param_sync = param_sync
        self._ledger = ledger = param_sync.ledger
        for slot in {id(unit.slot): unit.slot for unit in units}.values():
            if slot.allocated_nbytes:
                ledger.allocate(Buffer.PARAMS, slot.name, 0, slot.allocated_nbytes)

    def use(self, unit: ShardedUnit, ahead: Sequence[str] = ()) -> None:
        """Gather `unit`, and wait for it, whatever must be evicted.

        Before the wait, start to gather the units `ahead`, if their slots are free.
        """
        if unit.state is State.SHARDED:
            self._evict_for(unit)
            self._start(unit)
        self.prefetch(ahead)
        if unit.state is State.GATHERING:
            with self._ledger.ranges.around("wait for", unit.name):
                unit.finish_gather()
            self._ledger.note(EventKind.READY, unit.name)

    def prefetch(self, names: Sequence[str]) -> None:
        """Start to gather units that will be used soon, up to the first whose slot is in use."""
        for name in names:
            unit = self._units[name]
            if unit.state is State.SHARDED:
                if unit.slot.owner is not None:
                    return  # to skip it would gather in another order than other ranks
                self._start(unit)

    def release(self, unit: ShardedUnit) -> None:
        """Release a unit, if the strategy shards parameters and it is not released already."""
        if self._strategy.shards_params and unit.state is not State.SHARDED:
            unit.release()
            self._ledger.note(EventKind.RELEASE, unit.name)
            if not unit.slot.resident:
                self._ledger.free(Buffer.PARAMS, unit.slot.name, 0)

    def release_all(self) -> None:
        """Release all units and invalidate the slots."""
        for unit in self._units.values():
            self.release(unit)
        self.invalidate()

    def invalidate(self) -> None:
        """Invalidate the contents of all slots: the master weights may have changed."""
        for unit in self._units.values():
            unit.slot.content = None

    def _start(self, unit: ShardedUnit) -> None:
        if unit.slot.content == unit.name:
            unit.unshard()
            self._ledger.note(EventKind.READY, unit.name)
            return
        self._param_sync.begin_gather(unit.name)
        if not unit.slot.resident:
            self._ledger.allocate(Buffer.PARAMS, unit.slot.name, 0, unit.slot.nbytes)
        with self._ledger.ranges.around("gather", unit.name):
            unit.start_gather(self._mesh.shard, self.host)
        number = self.fingerprint * 1_000_003 + self._numbers[unit.name]
        self.fingerprint = number % _FINGERPRINTS
        self._ledger.note(EventKind.GATHER, unit.name, unit.nbytes)

    def _evict_for(self, unit: ShardedUnit) -> None:
        if unit.slot.owner is None:
            return
        owner = self._units[unit.slot.owner]
        if owner.is_running:
            raise EngineError(
                f"{unit.name} is called inside {owner.name}, with which it shares memory; pass "
                "units= so that neither is part of the other's forward"
            )
        self.release(owner)
