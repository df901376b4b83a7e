"""Makes units whole and lets them go, within the memory that the plan gives them."""

from collections.abc import Sequence

from fsdpctl.comm.mesh import Mesh
from fsdpctl.engine.renewal import Renewal
from fsdpctl.engine.unit import ShardedUnit, State
from fsdpctl.errors import EngineError
from fsdpctl.plan.schedule import Buffer, EventKind
from fsdpctl.plan.strategy import Strategy

_FINGERPRINTS = 1 << 36  # how many; sums over 100,000 ranks are exact in float64


class Gatherer:
    """Gathers and releases units; one that needs a slot in use evicts its owner."""

    def __init__(
        self, units: Sequence[ShardedUnit], strategy: Strategy, mesh: Mesh, renewal: Renewal
    ) -> None:
        self.fingerprint = 0  # of the units gathered since it was last compared, in order
        self._units = {unit.name: unit for unit in units}
        self._numbers = {name: number for number, name in enumerate(self._units, start=1)}
        self._strategy = strategy
        self._mesh = mesh
        self._renewal = renewal
        self._ledger = ledger = renewal.ledger
        for slot in {id(unit.slot): unit.slot for unit in units}.values():
            if slot.allocated_nbytes:
                ledger.allocate(Buffer.PARAMS, slot.name, 0, slot.allocated_nbytes)

    def use(self, unit: ShardedUnit, ahead: Sequence[str] = ()) -> None:
        """Return once `unit` is whole, whatever had to make room for it.

        Before it waits it starts to gather those that come next, where their slots are free.
        """
        if unit.state is State.AT_REST:
            self._evict_for(unit)
            self._start(unit)
        self.ahead(ahead)
        if unit.state is State.GATHERING:
            with self._ledger.ranges.around("wait for", unit.name):
                unit.finish_gather()
            self._ledger.note(EventKind.READY, unit.name)

    def ahead(self, names: Sequence[str]) -> None:
        """Start to gather units that will be used soon, where their slot is free."""
        for name in names:
            unit = self._units[name]
            if unit.state is State.AT_REST:
                if unit.slot.owner is not None:
                    return  # to skip it would gather in another order than other ranks
                self._start(unit)

    def release(self, unit: ShardedUnit) -> None:
        """Give back the memory of a unit, if it has any to give."""
        if self._strategy.shards_params and unit.state is not State.AT_REST:
            unit.release()
            self._ledger.note(EventKind.RELEASE, unit.name)
            if not unit.slot.resident:
                self._ledger.free(Buffer.PARAMS, unit.slot.name, 0)

    def rest(self) -> None:
        """Release everything that is released between steps."""
        for unit in self._units.values():
            self.release(unit)
        self.forget()

    def forget(self) -> None:
        """What slots still have is not used again: the masters may have changed since."""
        for unit in self._units.values():
            unit.slot.content = None

    def _start(self, unit: ShardedUnit) -> None:
        if unit.slot.content == unit.name:
            unit.take_back()
            self._ledger.note(EventKind.READY, unit.name)
            return
        if not unit.slot.resident:
            self._ledger.allocate(Buffer.PARAMS, unit.slot.name, 0, unit.slot.nbytes)
        with self._ledger.ranges.around("gather", unit.name):
            self._renewal.begin_gather(unit.name)
            unit.start_gather(self._mesh.shard)
        number = self.fingerprint * 1_000_003 + self._numbers[unit.name]
        self.fingerprint = number % _FINGERPRINTS
        self._ledger.note(EventKind.GATHER, unit.name, unit.nbytes)

    def _evict_for(self, unit: ShardedUnit) -> None:
        if unit.slot.owner is None:
            return
        owner = self._units[unit.slot.owner]
        if owner.is_running:
            raise EngineError(
                f"{unit.name} is called inside {owner.name}, with which it shares its memory: pass "
                "units= so that neither is part of the other's forward"
            )
        self.release(owner)
