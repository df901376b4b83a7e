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
    agree_on_forwards,
    in_backward,
)
from fsdpctl.engine.buffer_accounting import BufferAccounting
from fsdpctl.engine.flat_buffer import FlatBuffer
from fsdpctl.engine.gradients import GradientReducer
from fsdpctl.engine.host_worker import HostTask
from fsdpctl.engine.offload import HostStates
from fsdpctl.engine.parameters import ShardedParameters
from fsdpctl.engine.unit import HostParams, ShardedUnit
from fsdpctl.errors import EngineError
from fsdpctl.plan.schedule import BufferKind, Event, EventKind, Schedule
from fsdpctl.plan.step_plan import StepPlan
from fsdpctl.plan.strategy import Strategy

K = EventKind
_FINGERPRINTS = 1 << 36  # fingerprints are below it: sums over 100,000 ranks are exact in float64


class ParamSync:
    """The updates of master weights to ranks that store a copy, unit by unit after a step.

    This concerns only parameters that are stored separately from the masters. A unit waits for its
    update when it is gathered, or used if it stays unsharded. Units that no forward has called as a
    module wait at the beginning of a forward.
    """

    def __init__(
        self,
        units: Sequence[ShardedUnit],
        strategy: Strategy,
        mesh: Mesh,
        accounting: BufferAccounting,
    ) -> None:
        self.overlaps = False  # whether updates may be in flight when `start` returns
        self.accounting = accounting
        self._units = {unit.name: unit for unit in units}
        self._strategy, self._mesh = strategy, mesh
        self._arriving: dict[str, list[Handle]] = {}
        self._uncalled = set(self._units)

    def start(self, *, trained_only: bool) -> None:
        """Send changed masters to other ranks; `trained_only`: not of frozen parameters."""
        self.finish()
        for unit in self._units.values():
            unit.masters_changed()
            buffers = unit.trained_buffers if trained_only else unit.buffers
            handles = [buffer.start_sync(self._mesh) for buffer in buffers]
            self._arriving[unit.name] = [handle for handle in handles if handle is not None]
            if buffers:
                self._note_sync(unit.name, buffers)
        if not self.overlaps:
            self.finish()

    def start_after(self, tasks: Mapping[str, tuple[HostTask, list[list[Tensor]]]]) -> None:
        """Send the master weights of each unit to other ranks once the host has stepped the unit.

        `tasks` has the task of each unit, and its gradients on the device, dropped after the task.
        """
        for name, (task, gradients) in tasks.items():
            unit = self._units[name]
            unit.masters_changed()
            for number, each in enumerate(gradients):
                self.accounting.deallocate(BufferKind.GRADS, name, number)
                if each:
                    self.accounting.allocate(BufferKind.OFFLOADING, name, number, each[0].nbytes)
            self._arriving[name] = [Handle(partial(self._end_step, unit, task, gradients))]
        if not (self.overlaps or self._strategy.shards_params):
            self.finish()

    def _end_step(self, unit: ShardedUnit, task: HostTask, gradients: list[list[Tensor]]) -> Tensor:
        """Wait until the host has stepped a unit, and send its masters to other ranks."""
        task.wait()
        for number, each in enumerate(gradients):
            each.clear()
            self.accounting.deallocate(BufferKind.OFFLOADING, unit.name, number)
        for buffer in unit.trained_buffers:
            handle = buffer.start_sync(self._mesh, is_copied=True)
            if handle is not None:
                handle.wait()
        self._note_sync(unit.name, unit.trained_buffers)
        return unit.trained_buffers[0].param_shard

    def _note_sync(self, name: str, buffers: Sequence[FlatBuffer]) -> None:
        if self._strategy.syncs_params:
            nbytes = sum(each.resident.values.nbytes for each in buffers if each.resident)
            self.accounting.record(EventKind.SYNC, name, nbytes)

    def begin_forward(self) -> None:
        """Wait for units that no forward has called as a module, in one order on all ranks.

        The waits may start collectives, so another order would deadlock.
        """
        self.wait(*(name for name in self._units if name in self._uncalled))

    def begin_unit(self, name: str) -> None:
        self._uncalled.discard(name)
        self.wait(name)

    def wait(self, *names: str) -> None:
        for name in names if self._arriving else ():
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
        self.mesh = mesh
        self.buffers = tuple(buffer for unit in units for buffer in unit.buffers)
        self.trained_buffers = tuple(each for each in self.buffers if each.shard.trainable)
        self.parameters = ShardedParameters(
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
        self.on_last_reduction: Callable[[], None] = lambda: None  # the last reduction has begun
        self.has_unreduced_grads = False  # whether gradients are held for a later reduction
        self.has_lost_grads = False  # whether an exception dropped gradients
        self.host: HostStates | None = None  # steps master weights that are in host memory
        self.host_params: HostParams | None = None  # parameters in host memory
        self.tracker = BackwardTracker()
        self.backward = OutermostBackward()
        self.fingerprint = 0  # hash of the units gathered since the last comparison, in order
        self._numbers = {name: number for number, name in enumerate(self.units, start=1)}
        for slot in {id(unit.unshard_buffer): unit.unshard_buffer for unit in units}.values():
            if slot.allocated_nbytes:
                self.accounting.allocate(BufferKind.PARAMS, slot.name, 0, slot.allocated_nbytes)

    @property
    def device(self) -> torch.device:
        return self.root.unshard_buffer.device

    @property
    def has_all_gradients(self) -> bool:
        """Whether every trainable parameter had a gradient since gradients were dropped."""
        return all(len(each.params_with_grad) == len(each.params) for each in self.trained_buffers)

    def _execute(self, events: Iterable[Event]) -> None:
        for event in events:
            unit = self.units[event.unit]
            match event.kind:
                case K.GATHER:
                    self._gather(unit)
                case K.READY:
                    with self.accounting.ranges.annotate("wait for", unit.name):
                        unit.unshard()
                    self.accounting.record(K.READY, unit.name)
                case K.FREE:
                    unit.free()
                    self.accounting.record(K.FREE, unit.name)
                    if not unit.unshard_buffer.is_permanent:
                        self.accounting.deallocate(BufferKind.PARAMS, unit.unshard_buffer.name, 0)
                case K.FORWARD | K.LEAVE | K.BACKWARD:
                    if event.kind is K.FORWARD and unit is not self.root:
                        self.param_sync.begin_unit(unit.name)
                    self.accounting.record(event.kind, unit.name)
                case _:
                    self.reducer.execute(event)

    def _gather(self, unit: ShardedUnit) -> None:
        self.param_sync.wait(unit.name)
        buffer = unit.unshard_buffer
        if not buffer.is_permanent:
            self.accounting.allocate(BufferKind.PARAMS, buffer.name, 0, buffer.nbytes)
        with self.accounting.ranges.annotate("gather", unit.name):
            unit.gather(self.mesh.shard, self.host_params)
        number = self.fingerprint * 1_000_003 + self._numbers[unit.name]
        self.fingerprint = number % _FINGERPRINTS
        self.accounting.record(K.GATHER, unit.name, unit.nbytes)

    def free_all(self) -> None:
        self._execute(self.schedule.free_all())

    def prefetch_forward(self) -> None:
        """Start to gather the first units of a forward, while their unshard buffers are free."""
        if not self.strategy.shards_params:
            problem = f"{self.strategy.name} has nothing to gather"
            raise EngineError(f"prefetch_forward_params: {problem}")
        if self.schedule.is_prefetched:
            raise EngineError("prefetch_forward_params: called twice without a forward between")
        self._execute(self.schedule.prefetch_forward())

    def begin_forward(self) -> None:
        if self.backward.has_failed:
            self.has_lost_grads = True
            self.recover()
        self.parameters.check()
        self.param_sync.begin_forward()
        trains = torch.is_grad_enabled()
        self.tracker.begin_forward(makes_graph=trains)
        self._execute(self.schedule.begin_forward(has_backward=trains))

    def begin_unit(self, unit: ShardedUnit) -> None:
        if in_backward():
            self._execute(self.schedule.recompute_unit(unit.name))
            return
        self._execute(self.schedule.begin_unit(unit.name))
        self.tracker.record_forward(unit.name, grad_enabled=torch.is_grad_enabled())
        self.accounting.ranges.begin("forward", unit.name)

    def end_unit(self, unit: ShardedUnit) -> None:
        if in_backward():
            return
        self.accounting.ranges.end()
        self._execute(self.schedule.end_unit(unit.name, has_backward=torch.is_grad_enabled()))

    def end_forward(self) -> None:
        self.tracker.end_forward()
        if not torch.is_grad_enabled():
            self._execute(self.schedule.end_evaluation())

    def begin_backward(self, first: ForwardPass | None = None) -> None:
        """Begin a backward with the first gradient, of an output of `first`.

        Pass None as `first` if that forward ran within a backward.
        """
        if self.backward.has_failed:
            self.has_lost_grads = True
            self.recover()
        if not self.backward.has_begun:
            self.backward.begin(self.end_backward)
            self.tracker.begin_backward(first, self._agree)
        self._execute(self.schedule.begin_backward())

    def _agree(self, takes_part: Sequence[bool]) -> Sequence[bool]:
        name = self.strategy.name if self.strategy.reshard_after_forward else None
        return agree_on_forwards(self.mesh.world, takes_part, same_under=name)

    def begin_unit_backward(self, unit: ShardedUnit, call: UnitCall | None) -> None:
        """Begin a unit's backward with the gradient of one of a call's outputs."""
        if not self.backward.is_running:
            # The loss does not depend on the outermost module's output.
            self.begin_backward(None if call is None else call.forward)
        self.accounting.ranges.end()  # ends the range of the previous unit
        completed: list[str] = []
        if self.backward.is_current and call is not None:
            self.tracker.reach(call)
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
        self.accounting.record(K.LEAVE, self.root.name)
        self.has_unreduced_grads = not self.reduces
        self.tracker.end_backward(keeps_graph=self.backward.keeps_graph())
        self.backward.end()
        if self.schedule.learn_order():
            warnings.warn(
                "the model runs its units in another order than it defines them; prefetching now "
                f"follows the order {', '.join(self.schedule.order.forward)}",
                stacklevel=2,
            )
        self.parameters.check_gradients()

    def _finish_reductions(self) -> None:
        self.on_last_reduction()
        self._execute(self.schedule.finish())
        self.reducer.free_offloaded()

    def recover(self) -> None:
        """Clean up after a backward that ended in an exception."""
        self.accounting.ranges.end_all()
        self.reducer.abandon()
        self.free_all()
        self.schedule.reset()
        self.tracker.reset()
        self.has_unreduced_grads = False
        self.backward.end()

    def drop_gradients(self) -> None:
        if self.backward.has_failed:
            self.recover()
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
        self.parameters.check_gradients()
        if not any(buffer.shard.has_grad for buffer in self.trained_buffers):
            raise EngineError("sync_gradients: there are no gradients; call backward first")

    @torch.no_grad()
    def masters_changed(self, *, trained_only: bool = False) -> None:
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
        self.param_sync.start_after(self.host.step(units, update, scalars))
