"""Which unit is whole when: the state of a sharded model while it runs.

The plan says the order of the units and how far ahead to gather. The runtime follows the module
and autograd events as they really come: a unit that needs a slot in use evicts its owner, whose
next use gathers it again; a prefetch never evicts.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.hooks import RemovableHandle

from fsdpctl.comm.mesh import Mesh
from fsdpctl.engine.ledger import Ledger
from fsdpctl.engine.reduction import GradientReducer
from fsdpctl.engine.unit import ShardedUnit, State, UnitBuffer
from fsdpctl.errors import EngineError
from fsdpctl.plan.schedule import (
    Buffer,
    EventKind,
    Prefetch,
    UnitOrder,
    following,
    reductions_in_flight,
)
from fsdpctl.plan.strategy import Strategy

_NO_TASK = -1
_FINGERPRINTS = 1 << 40  # how many there are; their sum over ranks is exact in float64


def current_backward() -> int:
    """The number of the backward that autograd runs on this thread, or _NO_TASK."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return current_backward() != _NO_TASK


@dataclass(slots=True)
class Call:
    """One forward of a unit, and whether its backward has begun."""

    unit: ShardedUnit
    began: bool = False


class Runtime:
    """Gathers, releases and reduces units as their modules run."""

    def __init__(
        self,
        units: Sequence[ShardedUnit],
        order: UnitOrder,
        *,
        strategy: Strategy,
        prefetch: Prefetch,
        mesh: Mesh,
        reduce_dtypes: dict[torch.dtype, torch.dtype],
    ) -> None:
        self.units = {unit.name: unit for unit in units}
        self.order = order
        self.root = self.units[order.root]
        self.strategy = strategy
        self.prefetch = prefetch
        self.mesh = mesh
        self.reduces = True  # whether backward reduces what it finds
        self.hooks: list[RemovableHandle] = []
        self.has_pending_prefetch = False  # asked for, and not used by a forward yet
        self.ledger = Ledger()
        self.reducer = GradientReducer(
            [self.units[name] for name in order.reduction],
            mesh,
            reduce_dtypes,
            self.ledger,
            limit=reductions_in_flight(dtype.itemsize for dtype in reduce_dtypes.values()),
        )
        self.num_backwards = 0  # that have ended
        self._backward = _NO_TASK  # the outermost one that is running, or did not end
        self.gather_fingerprint = 0  # of the units gathered since it was last compared, in order
        self._numbers = {name: number for number, name in enumerate(self.units, start=1)}
        self._forward_order: list[str] | None = []  # as it really is, until it is known
        self._num_closed = 0  # units whose backward is over, in the order of reduction
        for slot in {id(unit.slot): unit.slot for unit in units}.values():
            if slot.allocated_nbytes:
                self.ledger.allocate(Buffer.PARAMS, slot.name, 0, slot.allocated_nbytes)

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.root.slot.device

    @property
    def has_all_gradients(self) -> bool:
        """Whether every trainable parameter had a gradient since they were dropped."""
        buffers = (b for unit in self.units.values() for b in unit.trained_buffers)
        return all(len(buffer.present) == len(buffer.params) for buffer in buffers)

    # ---- gathering -----------------------------------------------------------------------

    def use(self, unit: ShardedUnit) -> None:
        """Return once `unit` is whole, whatever had to make room for it."""
        if unit.state is State.AT_REST:
            self._evict(unit)
            self._start_gather(unit)
        if unit.state is State.GATHERING:
            unit.finish_gather()
            self.ledger.note(EventKind.READY, unit.name)

    def gather_ahead(self, names: Sequence[str]) -> None:
        """Start to gather units that will be used soon, where their slot is free."""
        for name in names:
            unit = self.units[name]
            if unit.state is State.AT_REST:
                if unit.slot.owner is not None:
                    return  # to skip it would gather in another order than other ranks
                self._start_gather(unit)

    def release(self, unit: ShardedUnit) -> None:
        """Give back the memory of a unit, if it has any to give."""
        if self.strategy.shards_params and unit.state is not State.AT_REST:
            unit.release()
            self.ledger.note(EventKind.RELEASE, unit.name)
            if not unit.slot.resident:
                self.ledger.free(Buffer.PARAMS, unit.slot.name, 0)

    def _start_gather(self, unit: ShardedUnit) -> None:
        if not unit.slot.resident:
            self.ledger.allocate(Buffer.PARAMS, unit.slot.name, 0, unit.slot.nbytes)
        unit.start_gather(self.mesh.shard)
        number = self.gather_fingerprint * 1_000_003 + self._numbers[unit.name]
        self.gather_fingerprint = number % _FINGERPRINTS
        self.ledger.note(EventKind.GATHER, unit.name, unit.nbytes)

    def _evict(self, unit: ShardedUnit) -> None:
        if unit.slot.owner is not None:
            self.release(self.units[unit.slot.owner])

    def prefetch_forward(self) -> None:
        """Start to gather what a forward uses first, as far as there is room."""
        if not self.strategy.shards_params:
            raise EngineError(
                f"prefetch_forward_params: {self.strategy.name} has nothing to gather"
            )
        if self.has_pending_prefetch:
            raise EngineError("prefetch_forward_params: called twice without a forward between")
        self.gather_ahead([self.order.root, *self.order.forward[: self.prefetch.forward + 1]])
        self.has_pending_prefetch = True

    # ---- forward -------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The outermost module starts."""
        if self._backward != _NO_TASK and not in_backward():
            self.recover()
        self.has_pending_prefetch = False
        if self.strategy.shards_params:
            self.use(self.root)
            self.gather_ahead(self.order.forward[: self.prefetch.forward])

    def begin_unit(self, unit: ShardedUnit) -> None:
        """A unit's forward starts, or is computed again in backward."""
        self.use(unit)
        if in_backward():
            return
        if self._forward_order is not None and torch.is_grad_enabled():
            self._forward_order.append(unit.name)
        self.gather_ahead(following(self.order.forward, unit.name, self.prefetch.forward))

    def end_unit(self, unit: ShardedUnit) -> None:
        """A unit's forward has ended."""
        if in_backward():
            return
        if not torch.is_grad_enabled() or not self.order.keeps_after_forward(
            unit.name, self.strategy
        ):
            self.release(unit)

    def end_forward(self) -> None:
        """The outermost module has ended."""
        if not torch.is_grad_enabled():
            self.release(self.root)

    # ---- backward ------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """The first gradient of a backward is there, as a rule that of the outermost output."""
        if self._backward == _NO_TASK:
            self._backward = current_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        self.use(self.root)

    def opened(self, call: Call) -> None:
        """A unit's forward has made something whose gradient will come."""
        if not in_backward():
            call.unit.open_calls += 1

    def begin_unit_backward(self, call: Call) -> None:
        """The gradient of one of a call's outputs is there."""
        unit = call.unit
        if self._backward == _NO_TASK:  # the loss does not come from the outermost module's output
            self.begin_backward()
        if current_backward() == self._backward:
            unit.open_calls -= not call.began
            call.began = True
            self._close_before(unit)
        if unit.name in self.order.needs_no_backward_gather:
            return
        self.use(unit)
        self.gather_ahead(following(self.order.backward, unit.name, self.prefetch.backward))

    def gradient_arrived(self, unit: ShardedUnit, buffer: UnitBuffer, index: int) -> None:
        """A parameter's gradient is complete."""
        buffer.arrived.add(index)
        # A backward within a backward (re-entrant checkpointing) may bring another one later.
        if current_backward() != self._backward != _NO_TASK:
            self.reducer.collect(unit)

    def _close_before(self, unit: ShardedUnit) -> None:
        """The backward of `unit` begins: that of the units before it is over.

        Counting arrived gradients would not do: a parameter that only some ranks use would let
        the others run ahead, and wait for each other in different collectives.
        """
        for name in self.order.reduction[self._num_closed :]:
            other = self.units[name]
            if other is unit or other.open_calls > 0:
                return
            self._close(other)

    def _close(self, unit: ShardedUnit) -> None:
        self._num_closed += 1
        self.release(unit)
        if self.reduces:
            self.reducer.advance(unit)
        elif unit.trained_buffers:
            self.reducer.collect(unit)
            self.ledger.note(EventKind.HOLD, unit.name)

    def end_backward(self) -> None:
        """Autograd has done all it had to do."""
        for name in self.order.reduction[self._num_closed :]:
            self._close(self.units[name])
        for unit in self.units.values():
            self.release(unit)
            unit.open_calls = 0
        if self.reduces:
            self.reducer.finish()
        self.num_backwards += 1
        self._num_closed = 0
        self._backward = _NO_TASK
        self._settle_order()
        for unit in self.units.values():
            if any(buffer.arrived for buffer in unit.buffers):
                raise EngineError(
                    f"gradients of {unit.name} came after it was reduced: its output reaches the "
                    "loss in a way that hooks do not see"
                )

    def _settle_order(self) -> None:
        """After the first backward: plan the units in the order in which they really ran."""
        seen, self._forward_order = self._forward_order, None
        if not seen or not self.strategy.shards_params:
            return  # gradients are reduced in the planned order, which all ranks know
        order = self.order.as_seen(seen)
        if order != self.order:
            warnings.warn(
                "the model runs its units in another order than it defines them: from now on they "
                f"are gathered ahead in the order {', '.join(order.forward)}",
                stacklevel=2,
            )
            self.order = order
            self.reducer.units = tuple(self.units[name] for name in order.reduction)

    # ---- between steps -------------------------------------------------------------------

    def recover(self) -> None:
        """Clear what a backward left behind that ended in an exception."""
        self.reducer.abandon()
        self.rest()
        self._num_closed = 0
        self._backward = _NO_TASK
        if self._forward_order is not None:
            self._forward_order = []

    def rest(self) -> None:
        """Release everything that is released between steps."""
        for unit in self.units.values():
            self.release(unit)

    @torch.no_grad()
    def masters_changed(self) -> None:
        """The masters were written to: what was gathered from them is out of date."""
        self.rest()
        handles = []
        for unit in self.units.values():
            unit.masters_changed()
            if self.strategy.keeps_whole_params:
                handles += unit.start_sync(self.mesh.shard)
                if self.strategy.shards_optimizer:
                    self.ledger.note(EventKind.SYNC, unit.name, unit.nbytes)
        for handle in handles:
            handle.wait()
