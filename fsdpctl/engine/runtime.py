"""Executes the schedule of a sharded model as its modules and autograd run."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fsdpctl.comm.collectives import Handle
from fsdpctl.comm.flat_shard import HostScalars, HostUpdateFn
from fsdpctl.comm.mesh import Mesh
from fsdpctl.engine.backward_tracker import (
    BackwardTracker,
    ForwardPass,
    OutermostBackward,
    UnitCall,
    in_backward,
)
from fsdpctl.engine.buffer_accounting import BufferAccounting
from fsdpctl.engine.flat_buffer import FlatBuffer
from fsdpctl.engine.gradients import GradientReducer
from fsdpctl.engine.offload import HostStates, UnitStep
from fsdpctl.engine.parameters import ParameterSnapshot
from fsdpctl.engine.unit import HostParamPool, ShardedUnit
from fsdpctl.errors import EngineError
from fsdpctl.plan.schedule import BufferKind, Event, EventKind, Schedule
from fsdpctl.plan.step_plan import StepPlan
from fsdpctl.plan.strategy import Strategy

_FINGERPRINT_LIMIT = 1 << 36  # sums over 100,000 ranks are exact in float64


class ParamSync:
    """The updates of master weights to ranks that store a copy, unit by unit after a step.

    Parameters that are the masters themselves need no update. A unit waits for its update before it
    is gathered, or before its module runs if it stays unsharded. Units that no forward has called
    as a module wait in `begin_forward`.
    """

    def __init__(
        self,
        units: Sequence[ShardedUnit],
        strategy: Strategy,
        mesh: Mesh,
        accounting: BufferAccounting,
    ) -> None:
        # Whether updates may be in flight when an optimizer step returns.
        self.overlaps_forward = False
        self.accounting = accounting
        self._units = {unit.name: unit for unit in units}
        self._strategy, self._mesh = strategy, mesh
        self._arriving: dict[str, list[Handle]] = {}
        self._uncalled = set(self._units)

    def start(self, *, trained_only: bool) -> None:
        """Send changed masters to other ranks; `trained_only`: not of frozen parameters."""
        self.finish()
        for unit in self._units.values():
            unit.invalidate_graphs()
            buffers = unit.trained_buffers if trained_only else unit.buffers
            handles = [buffer.start_param_sync(self._mesh) for buffer in buffers]
            self._arriving[unit.name] = [handle for handle in handles if handle is not None]
            if buffers:
                self._record_sync(unit.name, buffers)
        if not self.overlaps_forward:
            self.finish()

    def start_after(self, steps: Mapping[str, UnitStep]) -> None:
        """Send the master weights of each unit to other ranks once the host has stepped the unit.

        The gradients on the device are dropped when the step of their unit is done.
        """
        for name, step in steps.items():
            unit = self._units[name]
            unit.invalidate_graphs()
            for index, gradient in enumerate(step.gradients):
                self.accounting.deallocate(BufferKind.GRADS, name, index)
                if gradient:
                    nbytes = gradient[0].nbytes
                    self.accounting.allocate(BufferKind.OFFLOADING, name, index, nbytes)
            # Waiting for this handle can start collectives; see `begin_forward`.
            self._arriving[name] = [Handle(partial(self._end_step, unit, step))]
        # Sharded units wait when they are gathered.
        if not (self.overlaps_forward or self._strategy.shards_params):
            self.finish()

    def _end_step(self, unit: ShardedUnit, step: UnitStep) -> Tensor:
        """Wait until the host has stepped a unit, and send its masters to other ranks."""
        step.task.wait()
        for index, gradient in enumerate(step.gradients):
            gradient.clear()
            self.accounting.deallocate(BufferKind.OFFLOADING, unit.name, index)
        for buffer in unit.trained_buffers:
            handle = buffer.start_param_sync(self._mesh, is_copied=True)
            if handle is not None:
                handle.wait()
        self._record_sync(unit.name, unit.trained_buffers)
        return unit.trained_buffers[0].param_shard  # unused: a handle requires a result

    def _record_sync(self, name: str, buffers: Sequence[FlatBuffer]) -> None:
        if self._strategy.syncs_params:
            nbytes = sum(each.stored.values.nbytes for each in buffers if each.stored)
            self.accounting.record(EventKind.SYNC, name, nbytes)

    def begin_forward(self) -> None:
        """Wait for units that no forward has called as a module.

        The waits may start collectives: in another order than on other ranks, they would deadlock.
        All ranks wait in the order of `_units`.
        """
        self.wait(*(name for name in self._units if name in self._uncalled))

    def begin_unit(self, name: str) -> None:
        self._uncalled.discard(name)
        self.wait(name)

    def wait(self, *names: str) -> None:
        for name in names:
            for handle in self._arriving.pop(name, ()):
                handle.wait()

    def finish(self) -> None:
        self.wait(*self._units)


class Runtime:
    """The runtime of a sharded model: gathers, frees and reduces units as their modules run."""

    def __init__(
        self, units: Sequence[ShardedUnit], plan: StepPlan, mesh: Mesh, reducer: GradientReducer
    ) -> None:
        self.units = {unit.name: unit for unit in units}
        self.plan, self.strategy = plan, plan.strategy
        self.schedule = Schedule.of(plan)
        self.root = self.units[plan.order.root]
        self.device = self.root.unshard_buffer.device
        self.mesh = mesh
        self.buffers = tuple(buffer for unit in units for buffer in unit.buffers)
        self.trained_buffers = tuple(each for each in self.buffers if each.shard.trainable)
        self.snapshot = ParameterSnapshot(
            [
                (buffer.shard.unit, spec, param)
                for buffer in self.buffers
                for spec, param in zip(buffer.layout.params, buffer.params, strict=True)
            ],
            self.device,
        )
        self.reduces = True  # whether backward reduces its gradients
        self.hooks: list[RemovableHandle] = []
        self.reducer = reducer
        self.accounting = reducer.accounting
        self.param_sync = ParamSync(units, self.strategy, mesh, self.accounting)
        # Called when a backward has started its last reduction.
        self.on_last_reduction: Callable[[], None] = lambda: None
        self.has_unreduced_grads = False  # whether gradients are held for a later reduction
        self.has_lost_grads = False  # whether an exception dropped gradients
        self.host: HostStates | None = None  # steps master weights that are in host memory
        self.host_params: HostParamPool | None = None  # parameters in host memory
        required_by = self.strategy.name if self.strategy.reshard_after_forward else None
        self.tracker = BackwardTracker(mesh.world, required_by)
        self.backward = OutermostBackward()
        self.fingerprint = 0  # hash of the units gathered since the last comparison, in order
        self._numbers = {name: number for number, name in enumerate(self.units, start=1)}
        for memory in dict.fromkeys(unit.unshard_buffer for unit in units):
            if nbytes := memory.allocated_nbytes:
                self.accounting.allocate(BufferKind.PARAMS, memory.name, index=0, nbytes=nbytes)

    @property
    def has_all_gradients(self) -> bool:
        """Whether every trainable parameter had a gradient since gradients were dropped."""
        return all(len(each.params_with_grad) == len(each.params) for each in self.trained_buffers)

    def _execute(self, events: Iterable[Event]) -> None:
        for event in events:
            unit = self.units[event.unit]
            match event.kind:
                case EventKind.GATHER:
                    self._gather(unit)
                case EventKind.READY:
                    with self.accounting.ranges.annotate("wait for", unit.name):
                        unit.unshard()
                    self.accounting.record(event.kind, unit.name)
                case EventKind.FREE:
                    unit.free()
                    self.accounting.record(event.kind, unit.name)
                    memory = unit.unshard_buffer
                    if not memory.is_permanent:
                        self.accounting.deallocate(BufferKind.PARAMS, memory.name, index=0)
                case EventKind.FORWARD | EventKind.LEAVE | EventKind.BACKWARD:
                    if event.kind is EventKind.FORWARD and unit is not self.root:
                        self.param_sync.begin_unit(unit.name)
                    self.accounting.record(event.kind, unit.name)
                case _:
                    self.reducer.execute(event)

    def _gather(self, unit: ShardedUnit) -> None:
        self.param_sync.wait(unit.name)
        memory = unit.unshard_buffer
        if not memory.is_permanent:
            self.accounting.allocate(BufferKind.PARAMS, memory.name, index=0, nbytes=memory.nbytes)
        with self.accounting.ranges.annotate("gather", unit.name):
            unit.start_gather(self.mesh.shard, self.host_params)
        extended = self.fingerprint * 1_000_003 + self._numbers[unit.name]
        self.fingerprint = extended % _FINGERPRINT_LIMIT
        self.accounting.record(EventKind.GATHER, unit.name, unit.nbytes)

    def free_all(self) -> None:
        self._execute(self.schedule.free_all())

    def prefetch_forward(self) -> None:
        """Start to gather the first units of a forward, while their unshard buffers are free."""
        if not self.strategy.shards_params:
            name = self.strategy.name
            raise EngineError(f"prefetch_forward_params: {name} has nothing to gather")
        if self.schedule.is_prefetched:
            raise EngineError("prefetch_forward_params: called twice without a forward between")
        self._execute(self.schedule.prefetch_forward())

    def begin_forward(self) -> None:
        if self.backward.has_failed:
            self._recover()
        self.snapshot.check()
        self.param_sync.begin_forward()
        trains = torch.is_grad_enabled()
        self.tracker.begin_forward(makes_graph=trains)
        self._execute(self.schedule.begin_forward(has_backward=trains))

    def begin_unit(self, unit: ShardedUnit) -> None:
        if in_backward():
            self._execute(self.schedule.recompute_unit(unit.name))
            return
        self._execute(self.schedule.begin_unit(unit.name))
        self.tracker.record_untracked(unit.name, grad_enabled=torch.is_grad_enabled())
        self.accounting.ranges.begin("forward", unit.name)

    def end_unit(self, unit: ShardedUnit) -> None:
        if in_backward():
            return
        self.accounting.ranges.end()
        self._execute(self.schedule.end_unit(unit.name, has_backward=torch.is_grad_enabled()))

    def end_forward(self) -> None:
        self.tracker.last_forward.close()
        if not torch.is_grad_enabled():
            self._execute(self.schedule.end_evaluation())

    def begin_backward(self, first: ForwardPass | None = None) -> None:
        """Begin a backward when its first gradient arrives, at an output of the forward `first`.

        Pass None if that forward ran within a backward.
        """
        if self.backward.has_failed:
            self._recover()
        if not self.backward.has_begun:
            self.backward.begin(self.end_backward)
            self.tracker.begin_backward(first)
        self._execute(self.schedule.begin_backward())

    def begin_unit_backward(self, unit: ShardedUnit, call: UnitCall | None) -> None:
        """Begin a unit's backward with the gradient of one of a call's outputs."""
        if not self.backward.is_running:
            # The loss does not depend on the outermost module's output.
            self.begin_backward(None if call is None else call.forward)
        self.accounting.ranges.end()  # ends the range of the previous unit
        completed: list[str] = []
        if self.backward.is_current and call is not None:
            self.tracker.reach(call)
            # Units that come earlier in the order of reduction, as far as they are complete.
            for other in self.schedule.pending_units():
                if other == unit.name or not self.tracker.is_complete(other, call):
                    break
                completed.append(other)
        self._execute(self.schedule.begin_unit_backward(unit.name, completed, reduces=self.reduces))
        self.accounting.ranges.begin("backward", unit.name)

    def end_backward(self) -> None:
        self.accounting.ranges.end_all()
        self._execute(self.schedule.end_units(reduces=self.reduces))
        if self.reduces:
            self._finish_reductions()
        self.accounting.record(EventKind.LEAVE, self.root.name)
        self.has_unreduced_grads = not self.reduces
        self.tracker.end_backward()
        self.backward.end()
        if self.schedule.learn_order():
            warnings.warn(
                "the model runs its units in another order than it defines them; prefetching now "
                f"follows the order {', '.join(self.schedule.order.forward)}",
                stacklevel=2,
            )
        self.snapshot.check_gradients()

    def _finish_reductions(self) -> None:
        self.on_last_reduction()
        self._execute(self.schedule.finish())
        self.reducer.free_offloaded()

    def _recover(self) -> None:
        """Clean up after a backward that ended in an exception, and drop the gradients."""
        self.accounting.ranges.end_all()
        self.reducer.abandon()
        self.free_all()
        self.schedule.reset()
        self.tracker.reset()
        self.has_unreduced_grads, self.has_lost_grads = False, True
        self.backward.end()

    def drop_gradients(self) -> None:
        if self.backward.has_failed:
            self._recover()
        self.reducer.drop_gradients()
        self.schedule.forget_gradients()
        self.has_unreduced_grads = self.has_lost_grads = False

    def sync_gradients(self) -> None:
        if self.backward.has_failed or self.has_lost_grads:
            raise EngineError(
                "the gradients are incomplete, because a backward ended in an exception; call "
                "zero_grad() and compute them again"
            )
        if self.has_unreduced_grads:
            self._execute(self.schedule.reduce_held())
            self._finish_reductions()
            self.has_unreduced_grads = False
        self.snapshot.check_gradients()
        if not any(buffer.shard.has_grad for buffer in self.trained_buffers):
            raise EngineError("sync_gradients: there are no gradients; call backward first")

    @torch.no_grad()
    def sync_params(self, *, trained_only: bool = False) -> None:
        """Free units that were gathered from old master weights, and send the new masters."""
        self.free_all()
        self.param_sync.start(trained_only=trained_only)

    def step_on_host(self, update: HostUpdateFn, scalars: HostScalars) -> None:
        """Start to step the master weights in host memory, in the order of the next forward."""
        assert self.host is not None
        self.free_all()
        self.param_sync.finish()
        order = self.schedule.order
        units = [self.units[name] for name in (order.root, *order.forward)]
        self.schedule.forget_gradients()
        self.param_sync.start_after(self.host.enqueue(units, update, scalars))
