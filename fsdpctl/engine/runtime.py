"""The state of a sharded model while it runs: which units are gathered.

The plan gives the order of the units and how far ahead to gather. The runtime follows the actual
module and autograd events: a unit that needs a slot in use evicts its owner, whose next use gathers
it again. A prefetch never evicts.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch.utils.hooks import RemovableHandle

from fsdpctl.comm.collectives import Mesh
from fsdpctl.comm.shards import HostScalars, HostUpdate
from fsdpctl.engine.agreement import agree_on_forwards
from fsdpctl.engine.calls import Call, Calls, Forward, OutermostBackward, in_backward
from fsdpctl.engine.gatherer import Gatherer, ParamSync
from fsdpctl.engine.offload import HostStates
from fsdpctl.engine.parameters import ShardedParameters
from fsdpctl.engine.reduction import GradientReducer
from fsdpctl.engine.unit import ShardedUnit
from fsdpctl.errors import EngineError
from fsdpctl.plan.schedule import EventKind, Prefetch
from fsdpctl.plan.strategy import Strategy
from fsdpctl.plan.units import UnitOrder, all_following


class Runtime:
    """Gathers, releases and reduces units as their modules run."""

    def __init__(
        self,
        units: Sequence[ShardedUnit],
        order: UnitOrder,
        strategy: Strategy,
        prefetch: Prefetch,
        mesh: Mesh,
        reducer: GradientReducer,
    ) -> None:
        self.units = {unit.name: unit for unit in units}
        self.strategy = strategy
        self.prefetch = prefetch
        self._follow(order)
        self.root = self.units[order.root]
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
        self.has_pending_prefetch = False  # requested, and not used by a forward yet
        self.reducer = reducer
        self.ledger = reducer.ledger
        self.param_sync = ParamSync(units, strategy, mesh, self.ledger)
        self.gatherer = Gatherer(units, strategy, mesh, self.param_sync)
        self.when_all_is_sent: Callable[[], None] = lambda: None  # the last reduction has begun
        self.holds_back = False  # whether there are gradients that no backward has reduced
        self.lost_gradients = False  # an exception dropped existing gradients
        self.host: HostStates | None = None  # steps master weights that are in host memory
        self.calls = Calls()
        self.backward = OutermostBackward()
        self._learns_order = strategy.shards_params  # others reduce as planned
        self._num_closed = 0  # units whose backward is over, in the order of reduction

    def _follow(self, order: UnitOrder) -> None:
        """Plan with `order` from now on, and precompute the lookups for every unit."""
        self.order = order
        self._reduction = tuple(self.units[name] for name in order.reduction)
        self._forward_ahead = all_following(order.forward, self.prefetch.forward)
        self._backward_ahead = all_following(order.backward, self.prefetch.backward)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.root.slot.device

    @property
    def has_all_gradients(self) -> bool:
        """Whether every trainable parameter had a gradient since gradients were dropped."""
        return all(len(each.present) == len(each.params) for each in self.trained_buffers)

    def prefetch_forward(self) -> None:
        """Start to gather the first units of a forward, up to the first whose slot is in use."""
        if not self.strategy.shards_params:
            raise EngineError(
                f"prefetch_forward_params: {self.strategy.name} has nothing to gather"
            )
        if self.has_pending_prefetch:
            raise EngineError("prefetch_forward_params: called twice without a forward between")
        self.gatherer.invalidate()
        self.gatherer.prefetch([self.order.root, *self._first_units()])
        self.has_pending_prefetch = True

    def _first_units(self) -> tuple[str, ...]:
        return self.order.forward[: self.prefetch.forward + 1]

    def begin_forward(self) -> None:
        """Begin the forward of the outermost module."""
        if self.backward.has_failed:
            self.lost_gradients = True
            self.recover()
        self.parameters.check()
        self.param_sync.begin_forward()
        self.calls.begin_forward(tracks=torch.is_grad_enabled())
        for unit in self.units.values():
            unit.is_running = False
        if not self.has_pending_prefetch:
            self.gatherer.invalidate()
        if self.strategy.shards_params:
            self.gatherer.use(self.root, self._first_units() if self.prefetch.forward else ())
        self.has_pending_prefetch = False
        self.ledger.note(EventKind.FORWARD, self.root.name)

    def begin_unit(self, unit: ShardedUnit) -> None:
        """Begin a unit's forward, or its recomputation in backward."""
        if in_backward():
            self.gatherer.use(unit)
            unit.was_used_in_backward = True
            return
        self.gatherer.use(unit, self._forward_ahead[unit.name])
        self.param_sync.begin_unit(unit.name)
        unit.is_running = True
        self.calls.ran(unit.name, tracks=torch.is_grad_enabled())
        self.ledger.note(EventKind.FORWARD, unit.name)
        self.ledger.ranges.begin("forward", unit.name)

    def end_unit(self, unit: ShardedUnit) -> None:
        """End a unit's forward."""
        if in_backward():
            return
        unit.is_running = False
        self.ledger.ranges.end()
        if not torch.is_grad_enabled() or not self.order.keeps_after_forward(
            unit.name, self.strategy
        ):
            self.gatherer.release(unit)
        self.ledger.note(EventKind.LEAVE, unit.name)

    def end_forward(self) -> None:
        """End the forward of the outermost module."""
        self.calls.end_forward()
        if not torch.is_grad_enabled():
            self.gatherer.release(self.root)

    def begin_backward(self, first: Forward | None = None) -> None:
        """Begin a backward with its first gradient, of `first`; None if that ran in a backward."""
        if self.backward.has_failed:
            self.lost_gradients = True
            self.recover()
        if not self.backward.has_begun:
            self.backward.begin(self.end_backward)
            self.calls.begin_backward(first, self._agree)
        self.gatherer.use(self.root)

    def _agree(self, takes_part: Sequence[bool]) -> Sequence[bool]:
        same = self.strategy.name if self.strategy.reshard_after_forward else None
        return agree_on_forwards(self.mesh.world, takes_part, same_under=same)

    def begin_unit_backward(self, unit: ShardedUnit, call: Call | None) -> None:
        """Begin a unit's backward with the gradient of one of a call's outputs."""
        if not self.backward.is_live:
            # The loss does not come from the outermost module's output.
            self.begin_backward(None if call is None else call.forward)
        self.ledger.ranges.end()  # of the previous unit
        over: list[ShardedUnit] = []
        if self.backward.is_running_here and call is not None:
            self.calls.begin(call)
            over = list(self._over_before(unit, call))
        # The last unit's gradients are sent after it was released and the next gathers have begun.
        # Those of earlier units are sent at once: other ranks may wait for them before they gather.
        for each in over:
            self._let_go(each)
            if each is not over[-1]:
                self._reduce(each)
        if unit.name not in self.order.needs_no_backward_gather:
            self.gatherer.use(unit, self._backward_ahead.get(unit.name, ()))
            unit.was_used_in_backward = True
        if over:
            self._reduce(over[-1])
        self.ledger.note(EventKind.BACKWARD, unit.name)
        self.ledger.ranges.begin("backward", unit.name)

    def _over_before(self, unit: ShardedUnit, call: Call) -> Iterator[ShardedUnit]:
        """Yield the units whose backward is over once that of `unit` begins."""
        for number in range(self._num_closed, len(self._reduction)):
            other = self._reduction[number]
            if other is unit or not self.calls.is_over(other.name, call):
                return
            yield other

    def _let_go(self, unit: ShardedUnit) -> None:
        """Release a unit whose backward is over.

        If it ran here and had no backward, it takes part in the gather that other ranks may need.
        """
        self._num_closed += 1
        if unit.name in self.calls.order and not unit.was_used_in_backward:
            again = self.order.is_gathered_again(unit.name, self.strategy)
            if self.strategy.shards_params and unit.trained_buffers and again:
                self.gatherer.use(unit)
        unit.was_used_in_backward = False
        self.gatherer.release(unit)

    def _reduce(self, unit: ShardedUnit) -> None:
        """Reduce a unit's gradients, which are complete, or hold them back."""
        if self.reduces:
            self.reducer.advance(unit)
        elif unit.trained_buffers:
            self.reducer.hold(unit)

    def end_backward(self) -> None:
        """End the backward when autograd has completed it."""
        self.ledger.ranges.end_all()
        for unit in self._reduction[self._num_closed :]:
            self._let_go(unit)
            self._reduce(unit)
        self.gatherer.release_all()
        if self.reduces:
            self.when_all_is_sent()
            self.reducer.finish()
        self.ledger.note(EventKind.LEAVE, self.root.name)
        self.holds_back, self._num_closed = not self.reduces, 0
        self.calls.end_backward(keeps_graph=self.backward.keeps_graph())
        self.backward.end()
        self._settle_order()
        self.parameters.check_gradients()

    def _settle_order(self) -> None:
        """Plan with the actual order of the units, after a backward through all of them."""
        seen = tuple(self.calls.order)
        if not self._learns_order or set(seen) != set(self.order.forward):
            return
        self._learns_order = False
        if seen != self.order.forward:
            warnings.warn(
                "the model runs its units in another order than it defines them; prefetching now "
                f"follows the order {', '.join(seen)}",
                stacklevel=2,
            )
            self._follow(replace(self.order, forward=seen))
            self.reducer.units = self._reduction

    def recover(self) -> None:
        """Clean up after a backward that ended in an exception."""
        self.ledger.ranges.end_all()
        self.reducer.abandon()
        self.gatherer.release_all()
        self.calls.forget()
        self.holds_back, self._num_closed = False, 0
        self.backward.end()

    def drop_gradients(self) -> None:
        """Drop all gradients."""
        if self.backward.has_failed:
            self.recover()
        self.reducer.drop_gradients()
        self.holds_back = self.lost_gradients = False

    def sync_gradients(self) -> None:
        """Reduce the gradients that were held back.

        Raises:
            EngineError: If there are no gradients, or they are incomplete.
        """
        if self.backward.has_failed or self.lost_gradients:
            raise EngineError(
                "the gradients are incomplete, because a backward ended in an exception; call "
                "zero_grad() and compute them again"
            )
        if self.holds_back:
            self.reducer.advance()
            self.when_all_is_sent()
            self.reducer.finish()
            self.holds_back = False
        self.parameters.check_gradients()
        if not any(buffer.shard.has_grad for buffer in self.trained_buffers):
            raise EngineError("sync_gradients: there are no gradients; call backward first")

    @torch.no_grad()
    def masters_changed(self, *, trained_only: bool = False) -> None:
        """Replace parameters that were gathered from old master weights."""
        self.gatherer.release_all()
        self.param_sync.start(trained_only=trained_only)

    def step_on_host(self, update: HostUpdate, scalars: HostScalars) -> None:
        """Start to step the master weights in host memory, in the order of the next forward."""
        assert self.host is not None
        self.gatherer.release_all()
        self.param_sync.finish()
        units = [self.units[name] for name in (self.order.root, *self.order.forward)]
        self.param_sync.start_after(self.host.step(units, update, scalars))
