"""Which unit is whole when: the state of a sharded model while it runs.

The plan says the order of the units and how far ahead to gather. The runtime follows the module
and autograd events as they really come: a unit that needs a slot in use evicts its owner, whose
next use gathers it again; a prefetch never evicts.
"""

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.utils.hooks import RemovableHandle

from fsdpctl.comm.mesh import Mesh
from fsdpctl.engine.calls import Call, Calls
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
        self.holds_back = False  # whether there is something that no backward has reduced
        self.lost_gradients = False  # an exception dropped gradients that were there
        self._calls = Calls()
        self._backward = _NO_TASK  # the outermost one that is running, or did not end
        self._ending: weakref.ref[_Ending] | None = None
        self._learns_order = strategy.shards_params  # others reduce as planned on every rank
        self.gather_fingerprint = 0  # of the units gathered since it was last compared, in order
        self._numbers = {name: number for number, name in enumerate(self.units, start=1)}
        self._num_closed = 0  # units whose backward is over, in the order of reduction
        for slot in {id(unit.slot): unit.slot for unit in units}.values():
            if slot.allocated_nbytes:
                self.ledger.allocate(Buffer.PARAMS, slot.name, 0, slot.allocated_nbytes)

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.root.slot.device

    @property
    def num_backwards(self) -> int:
        """How many have ended."""
        return self._calls.backward

    @property
    def is_stale(self) -> bool:
        """Whether the last backward ended in an exception, and nothing has cleared it since."""
        return self._backward != _NO_TASK and (self._ending is None or self._ending() is None)

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
        if unit.slot.owner is None:
            return
        owner = self.units[unit.slot.owner]
        if owner.is_running:
            raise EngineError(
                f"{unit.name} is called inside {owner.name}, with which it shares its memory: pass "
                "units= so that neither is part of the other's forward"
            )
        self.release(owner)

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
        if self.is_stale:
            self.lost_gradients = True
            self.recover()
        self._calls.begin_forward(tracks=torch.is_grad_enabled())
        for unit in self.units.values():
            unit.is_running = False
        self.has_pending_prefetch = False
        if self.strategy.shards_params:
            self.use(self.root)
            self.gather_ahead(self.order.forward[: self.prefetch.forward])

    def begin_unit(self, unit: ShardedUnit) -> None:
        """A unit's forward starts, or is computed again in backward."""
        self.use(unit)
        if in_backward():
            return
        unit.is_running = True
        self._calls.ran(unit.name, tracks=torch.is_grad_enabled())
        self.gather_ahead(following(self.order.forward, unit.name, self.prefetch.forward))

    def end_unit(self, unit: ShardedUnit) -> None:
        """A unit's forward has ended."""
        if in_backward():
            return
        unit.is_running = False
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
        if self.is_stale:
            self.lost_gradients = True
            self.recover()
        if self._backward == _NO_TASK:
            self._backward = current_backward()
            ending = _Ending(self)
            self._ending = weakref.ref(ending)  # autograd keeps it until that backward is gone
            torch.autograd.Variable._execution_engine.queue_callback(ending)
        self.use(self.root)

    def open_call(self, unit: ShardedUnit) -> Call | None:
        """A unit's forward makes something whose gradient will come; None within a backward."""
        return None if in_backward() else self._calls.open(unit.name)

    def begin_unit_backward(self, unit: ShardedUnit, call: Call | None) -> None:
        """The gradient of one of a call's outputs is there."""
        if self._backward == _NO_TASK or self.is_stale:
            self.begin_backward()  # the loss does not come from the outermost module's output
        if current_backward() == self._backward and call is not None:
            self._calls.begin(call)
            self._close_before(unit, call)
        if unit.name in self.order.needs_no_backward_gather:
            return
        self.use(unit)
        unit.was_used_in_backward = True
        self.gather_ahead(following(self.order.backward, unit.name, self.prefetch.backward))

    def gradient_arrived(self, unit: ShardedUnit, buffer: UnitBuffer, index: int) -> None:
        """A parameter's gradient is complete."""
        if self._backward == _NO_TASK or self.is_stale:
            self.begin_backward()  # of something that does not come out of a module
        buffer.arrived.add(index)
        # A backward within a backward (re-entrant checkpointing) may bring another one later.
        if current_backward() != self._backward:
            self.reducer.collect(unit)

    def _close_before(self, unit: ShardedUnit, call: Call) -> None:
        """The backward of `unit` begins: that of the units before it is over."""
        for name in self.order.reduction[self._num_closed :]:
            if name == unit.name or not self._calls.is_over(name, call):
                return
            self._close(self.units[name])

    def _close(self, unit: ShardedUnit) -> None:
        self._num_closed += 1
        if unit.name in self._calls.order and not unit.was_used_in_backward:
            self._gather_like_others(unit)
        unit.was_used_in_backward = False
        self.release(unit)
        if self.reduces:
            self.reducer.advance(unit)
        elif unit.trained_buffers:
            self.reducer.collect(unit)
            self.ledger.note(EventKind.HOLD, unit.name)

    def _gather_like_others(self, unit: ShardedUnit) -> None:
        """Take part in a gather that ranks need which use more of the unit's parameters."""
        if (
            self.strategy.shards_params
            and unit.trained_buffers
            and unit.name not in self.order.needs_no_backward_gather
            and not self.order.keeps_after_forward(unit.name, self.strategy)
        ):
            self.use(unit)

    def end_backward(self) -> None:
        """Autograd has done all it had to do."""
        for name in self.order.reduction[self._num_closed :]:
            self._close(self.units[name])
        for unit in self.units.values():
            self.release(unit)
        if self.reduces:
            self.reducer.finish()
        self.holds_back = not self.reduces
        self._calls.end_backward(
            keeps_graph=torch._C._autograd._get_current_graph_task_keep_graph()
        )
        self._num_closed = 0
        self._backward = _NO_TASK
        self._settle_order()
        for unit in self.units.values():
            if any(buffer.arrived for buffer in unit.buffers):
                raise EngineError(
                    f"gradients of {unit.name} came after it was reduced: its output reaches the "
                    "loss in a way that hooks do not see, or its parameters are used in the loss "
                    "before the model's forward"
                )

    def _settle_order(self) -> None:
        """After a backward through all units: plan them in the order in which they really ran."""
        seen = list(dict.fromkeys(self._calls.order))
        if not self._learns_order or set(seen) != set(self.order.forward):
            return
        self._learns_order = False
        if tuple(seen) != self.order.forward:
            warnings.warn(
                "the model runs its units in another order than it defines them: from now on they "
                f"are gathered ahead in the order {', '.join(seen)}",
                stacklevel=2,
            )
            self.order = replace(self.order, forward=tuple(seen))
            self.reducer.units = tuple(self.units[name] for name in self.order.reduction)

    # ---- between steps -------------------------------------------------------------------

    def recover(self) -> None:
        """Clear what a backward left behind that ended in an exception."""
        self.reducer.abandon()
        self.rest()
        self._calls.forget()
        self.holds_back = False
        self._num_closed = 0
        self._backward = _NO_TASK

    def drop_gradients(self) -> None:
        """Forget all gradients, wherever they are."""
        if self.is_stale:
            self.recover()
        self.reducer.drop_gradients()
        self.holds_back = self.lost_gradients = False

    def sync_gradients(self) -> None:
        """Reduce what was held back.

        Raises:
            EngineError: there is nothing that could be stepped with.
        """
        if self.is_stale or self.lost_gradients:
            raise EngineError(
                "the gradients are incomplete, because a backward ended in an exception: call "
                "zero_grad() and compute them again"
            )
        if self.holds_back:
            self.reducer.advance()
            self.reducer.finish()
            self.holds_back = False
        buffers = [buffer for unit in self.units.values() for buffer in unit.trained_buffers]
        if all(buffer.shard.grad is None for buffer in buffers):
            raise EngineError("sync_gradients: there are no gradients; call backward first")

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


class _Ending:
    """Called by autograd when a backward has ended; gone when it ended otherwise."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __call__(self) -> None:
        self._runtime.end_backward()
