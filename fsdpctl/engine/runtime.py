"""Executes the schedule of a sharded model as its modules and autograd run."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fsdpctl.comm.collectives import Handle
from fsdpctl.comm.flat_shard import HostScalars, HostUpdate
from fsdpctl.comm.mesh import Mesh
from fsdpctl.engine.backward_tracker import (
    Call,
    Calls,
    Forward,
    OutermostBackward,
    agree_on_forwards,
    in_backward,
)
from fsdpctl.engine.buffer_accounting import Ledger
from fsdpctl.engine.flat_buffer import UnitBuffer
from fsdpctl.engine.gradients import GradientReducer
from fsdpctl.engine.host_worker import Job
from fsdpctl.engine.offload import HostStates
from fsdpctl.engine.parameters import ShardedParameters
from fsdpctl.engine.unit import HostParams, ShardedUnit
from fsdpctl.errors import EngineError
from fsdpctl.plan.schedule import Buffer, Event, EventKind, Schedule
from fsdpctl.plan.step_plan import StepPlan
from fsdpctl.plan.strategy import Strategy

K = EventKind
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
        self._strategy, self._mesh = strategy, mesh
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
            if buffers:
                self._note_sync(unit.name, buffers)
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
        self._note_sync(unit.name, unit.trained_buffers)
        return unit.trained_buffers[0].part

    def _note_sync(self, name: str, buffers: Sequence[UnitBuffer]) -> None:
        if self._strategy.renews_params:
            nbytes = sum(each.resting.values.nbytes for each in buffers if each.resting)
            self.ledger.note(EventKind.SYNC, name, nbytes)

    def begin_forward(self) -> None:
        """Wait for the units that no forward calls as a module, in the same order on all ranks."""
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
    """Gathers, releases and reduces units as their modules run."""

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
        self.ledger = reducer.ledger
        self.param_sync = ParamSync(units, self.strategy, mesh, self.ledger)
        self.when_all_is_sent: Callable[[], None] = lambda: None  # the last reduction has begun
        self.holds_back = False  # whether there are gradients that no backward has reduced
        self.lost_gradients = False  # an exception dropped existing gradients
        self.host: HostStates | None = None  # steps master weights that are in host memory
        self.host_params: HostParams | None = None  # the parameters that rest in host memory
        self.calls = Calls()
        self.backward = OutermostBackward()
        self.fingerprint = 0  # of the units gathered since the last comparison, in order
        self._numbers = {name: number for number, name in enumerate(self.units, start=1)}
        for slot in {id(unit.slot): unit.slot for unit in units}.values():
            if slot.allocated_nbytes:
                self.ledger.allocate(Buffer.PARAMS, slot.name, 0, slot.allocated_nbytes)

    @property
    def device(self) -> torch.device:
        return self.root.slot.device

    @property
    def has_all_gradients(self) -> bool:
        """Whether every trainable parameter had a gradient since gradients were dropped."""
        return all(len(each.present) == len(each.params) for each in self.trained_buffers)

    def _do(self, events: Iterable[Event]) -> None:
        for event in events:
            unit = self.units[event.unit]
            match event.kind:
                case K.GATHER:
                    self._gather(unit)
                case K.READY:
                    with self.ledger.ranges.around("wait for", unit.name):
                        unit.unshard()
                    self.ledger.note(K.READY, unit.name)
                case K.RELEASE:
                    unit.release()
                    self.ledger.note(K.RELEASE, unit.name)
                    if not unit.slot.resident:
                        self.ledger.free(Buffer.PARAMS, unit.slot.name, 0)
                case K.FORWARD | K.LEAVE | K.BACKWARD:
                    if event.kind is K.FORWARD and unit is not self.root:
                        self.param_sync.begin_unit(unit.name)
                    self.ledger.note(event.kind, unit.name)
                case _:
                    self.reducer.do(event)

    def _gather(self, unit: ShardedUnit) -> None:
        self.param_sync.wait(unit.name)
        if not unit.slot.resident:
            self.ledger.allocate(Buffer.PARAMS, unit.slot.name, 0, unit.slot.nbytes)
        with self.ledger.ranges.around("gather", unit.name):
            unit.gather(self.mesh.shard, self.host_params)
        number = self.fingerprint * 1_000_003 + self._numbers[unit.name]
        self.fingerprint = number % _FINGERPRINTS
        self.ledger.note(K.GATHER, unit.name, unit.nbytes)

    def release_all(self) -> None:
        self._do(self.schedule.release_all())

    def prefetch_forward(self) -> None:
        """Start to gather the first units of a forward, up to the first whose slot is in use."""
        if not self.strategy.shards_params:
            problem = f"{self.strategy.name} has nothing to gather"
            raise EngineError(f"prefetch_forward_params: {problem}")
        if self.schedule.is_prefetched:
            raise EngineError("prefetch_forward_params: called twice without a forward between")
        self._do(self.schedule.prefetch_forward())

    def begin_forward(self) -> None:
        if self.backward.has_failed:
            self.lost_gradients = True
            self.recover()
        self.parameters.check()
        self.param_sync.begin_forward()
        trains = torch.is_grad_enabled()
        self.calls.begin_forward(tracks=trains)
        self._do(self.schedule.begin_forward(trains=trains))

    def begin_unit(self, unit: ShardedUnit) -> None:
        if in_backward():
            self._do(self.schedule.recompute_unit(unit.name))
            return
        self._do(self.schedule.begin_unit(unit.name))
        self.calls.ran(unit.name, tracks=torch.is_grad_enabled())
        self.ledger.ranges.begin("forward", unit.name)

    def end_unit(self, unit: ShardedUnit) -> None:
        if in_backward():
            return
        self.ledger.ranges.end()
        self._do(self.schedule.end_unit(unit.name, trains=torch.is_grad_enabled()))

    def end_forward(self) -> None:
        self.calls.end_forward()
        if not torch.is_grad_enabled():
            self._do(self.schedule.end_evaluation())

    def begin_backward(self, first: Forward | None = None) -> None:
        """Begin a backward with its first gradient, of `first`; None if that ran in a backward."""
        if self.backward.has_failed:
            self.lost_gradients = True
            self.recover()
        if not self.backward.has_begun:
            self.backward.begin(self.end_backward)
            self.calls.begin_backward(first, self._agree)
        self._do(self.schedule.begin_backward())

    def _agree(self, takes_part: Sequence[bool]) -> Sequence[bool]:
        same = self.strategy.name if self.strategy.reshard_after_forward else None
        return agree_on_forwards(self.mesh.world, takes_part, same_under=same)

    def begin_unit_backward(self, unit: ShardedUnit, call: Call | None) -> None:
        """Begin a unit's backward with the gradient of one of a call's outputs."""
        if not self.backward.is_live:
            # The loss does not come from the outermost module's output.
            self.begin_backward(None if call is None else call.forward)
        self.ledger.ranges.end()  # of the previous unit
        over: list[str] = []
        if self.backward.is_running_here and call is not None:
            self.calls.begin(call)
            for other in self.schedule.open_units():
                if other == unit.name or not self.calls.is_over(other, call):
                    break
                over.append(other)
        self._do(self.schedule.begin_unit_backward(unit.name, over, reduces=self.reduces))
        self.ledger.ranges.begin("backward", unit.name)

    def end_backward(self) -> None:
        self.ledger.ranges.end_all()
        self._do(self.schedule.end_units(reduces=self.reduces))
        if self.reduces:
            self._finish_reductions()
        self.ledger.note(K.LEAVE, self.root.name)
        self.holds_back = not self.reduces
        self.calls.end_backward(keeps_graph=self.backward.keeps_graph())
        self.backward.end()
        if self.schedule.learn_order():
            warnings.warn(
                "the model runs its units in another order than it defines them; prefetching now "
                f"follows the order {', '.join(self.schedule.order.forward)}",
                stacklevel=2,
            )
        self.parameters.check_gradients()

    def _finish_reductions(self) -> None:
        self.when_all_is_sent()
        self._do(self.schedule.finish())
        self.reducer.free_left()

    def recover(self) -> None:
        """Clean up after a backward that ended in an exception."""
        self.ledger.ranges.end_all()
        self.reducer.abandon()
        self.release_all()
        self.schedule.forget()
        self.calls.forget()
        self.holds_back = False
        self.backward.end()

    def drop_gradients(self) -> None:
        if self.backward.has_failed:
            self.recover()
        self.reducer.drop_gradients()
        self.schedule.gradients_dropped()
        self.holds_back = self.lost_gradients = False

    def sync_gradients(self) -> None:
        if self.backward.has_failed or self.lost_gradients:
            raise EngineError(
                "the gradients are incomplete, because a backward ended in an exception; call "
                "zero_grad() and compute them again"
            )
        if self.holds_back:
            self._do(self.schedule.reduce_held())
            self._finish_reductions()
            self.holds_back = False
        self.parameters.check_gradients()
        if not any(buffer.shard.has_grad for buffer in self.trained_buffers):
            raise EngineError("sync_gradients: there are no gradients; call backward first")

    @torch.no_grad()
    def masters_changed(self, *, trained_only: bool = False) -> None:
        """Replace parameters that were gathered from old master weights."""
        self.release_all()
        self.param_sync.start(trained_only=trained_only)

    def step_on_host(self, update: HostUpdate, scalars: HostScalars) -> None:
        """Start to step the master weights in host memory, in the order of the next forward."""
        assert self.host is not None
        self.release_all()
        self.param_sync.finish()
        order = self.schedule.order
        units = [self.units[name] for name in (order.root, *order.forward)]
        self.schedule.gradients_dropped()
        self.param_sync.start_after(self.host.step(units, update, scalars))
