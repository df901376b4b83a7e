"""Which unit is whole when: the state of a sharded model while it runs.

The plan says the order of the units and how far ahead to gather. The runtime follows the module
and autograd events as they really come: a unit that needs a slot in use evicts its owner, whose
next use gathers it again; a prefetch never evicts.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch.utils.hooks import RemovableHandle

from fsdpctl.comm.mesh import Mesh
from fsdpctl.engine.agreement import agree_on_forwards
from fsdpctl.engine.backward import OutermostBackward, in_backward
from fsdpctl.engine.calls import Call, Calls
from fsdpctl.engine.forward import Forward
from fsdpctl.engine.gatherer import Gatherer
from fsdpctl.engine.reduction import GradientReducer
from fsdpctl.engine.renewal import Renewal
from fsdpctl.engine.streams import ComputeStream
from fsdpctl.engine.trained import Trained
from fsdpctl.engine.unit import ShardedUnit
from fsdpctl.errors import EngineError
from fsdpctl.plan.order import UnitOrder, all_following
from fsdpctl.plan.schedule import EventKind, Prefetch
from fsdpctl.plan.strategy import Strategy


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
        reducer: GradientReducer,
    ) -> None:
        self.units = {unit.name: unit for unit in units}
        self.trained = Trained(units)
        self.strategy = strategy
        self.prefetch = prefetch
        self._follow(order)
        self.root = self.units[order.root]
        self.mesh = mesh
        self._stream = ComputeStream(self.root.slot.device)
        self.reduces = True  # whether backward reduces what it finds
        self.hooks: list[RemovableHandle] = []
        self.has_pending_prefetch = False  # asked for, and not used by a forward yet
        self.reducer = reducer
        self.ledger = reducer.ledger
        self.renewal = Renewal(units, strategy, mesh, self.ledger)
        self.gatherer = Gatherer(units, strategy, mesh, self.renewal)
        self.when_all_is_sent: Callable[[], None] = lambda: None  # the last reduction has begun
        self.holds_back = False  # whether there is something that no backward has reduced
        self.lost_gradients = False  # an exception dropped gradients that were there
        self.calls = Calls()
        self.backward = OutermostBackward()
        self._learns_order = strategy.shards_params  # others reduce as planned on every rank
        self._num_closed = 0  # units whose backward is over, in the order of reduction

    def _follow(self, order: UnitOrder) -> None:
        """Plan with `order` from now on: what is asked for at every unit is looked up."""
        self.order = order
        self._reduction = tuple(self.units[name] for name in order.reduction)
        self._forward_ahead = all_following(order.forward, self.prefetch.forward)
        self._backward_ahead = all_following(order.backward, self.prefetch.backward)

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.root.slot.device

    @property
    def has_all_gradients(self) -> bool:
        """Whether every trainable parameter had a gradient since they were dropped."""
        trained = (buffer for unit in self.units.values() for buffer in unit.trained_buffers)
        return all(len(each.present) == len(each.params) for each in trained)

    # ---- forward -------------------------------------------------------------------------

    def prefetch_forward(self) -> None:
        """Start to gather what a forward uses first, as far as there is room."""
        if not self.strategy.shards_params:
            raise EngineError(
                f"prefetch_forward_params: {self.strategy.name} has nothing to gather"
            )
        if self.has_pending_prefetch:
            raise EngineError("prefetch_forward_params: called twice without a forward between")
        self.gatherer.forget()
        self.gatherer.ahead([self.order.root, *self._first_units()])
        self.has_pending_prefetch = True

    def _first_units(self) -> tuple[str, ...]:
        return self.order.forward[: self.prefetch.forward + 1]

    def begin_forward(self) -> None:
        """The outermost module starts."""
        if self.backward.has_failed:
            self.lost_gradients = True
            self.recover()
        self.trained.refuse_changes()
        self._stream.refuse_another()
        self.renewal.begin_forward()
        self.calls.begin_forward(tracks=torch.is_grad_enabled())
        for unit in self.units.values():
            unit.is_running = False
        if not self.has_pending_prefetch:
            self.gatherer.forget()
        if self.strategy.shards_params:
            self.gatherer.use(self.root, self._first_units() if self.prefetch.forward else ())
        self.has_pending_prefetch = False
        self.ledger.note(EventKind.FORWARD, self.root.name)

    def begin_unit(self, unit: ShardedUnit) -> None:
        """A unit's forward starts, or is computed again in backward."""
        if in_backward():
            self.gatherer.use(unit)
            unit.was_used_in_backward = True
            return
        self.gatherer.use(unit, self._forward_ahead[unit.name])
        self.renewal.begin_unit(unit.name)
        unit.is_running = True
        self.calls.ran(unit.name, tracks=torch.is_grad_enabled())
        self.ledger.note(EventKind.FORWARD, unit.name)
        self.ledger.ranges.begin("forward", unit.name)

    def end_unit(self, unit: ShardedUnit) -> None:
        """A unit's forward has ended."""
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
        """The outermost module has ended."""
        self.calls.end_forward()
        if not torch.is_grad_enabled():
            self.gatherer.release(self.root)

    # ---- backward ------------------------------------------------------------------------

    def begin_backward(self, first: Forward | None = None) -> None:
        """The first gradient of a backward is there, as a rule that of the outermost output.

        `first`: the forward that it belongs to; None where that ran within a backward.
        """
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
        """The gradient of one of a call's outputs is there."""
        if not self.backward.is_live:
            # The loss does not come from the outermost module's output.
            self.begin_backward(None if call is None else call.forward)
        self.ledger.ranges.end()  # what came before
        over: list[ShardedUnit] = []
        if self.backward.is_running_here and call is not None:
            self.calls.begin(call)
            over = list(self._over_before(unit, call))
        # Room is made, and what comes next is on its way, before the gradients of the last one are
        # sent. Those before it are sent at once: others may need them before they gather on.
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
        """The backward of `unit` begins: the units whose own is over with that."""
        for number in range(self._num_closed, len(self._reduction)):
            other = self._reduction[number]
            if other is unit or not self.calls.is_over(other.name, call):
                return
            yield other

    def _let_go(self, unit: ShardedUnit) -> None:
        """The unit's parameters are no longer needed."""
        self._num_closed += 1
        if unit.name in self.calls.order and not unit.was_used_in_backward:
            self._gather_like_others(unit)
        unit.was_used_in_backward = False
        self.gatherer.release(unit)

    def _reduce(self, unit: ShardedUnit) -> None:
        """The unit's gradients are complete."""
        if self.reduces:
            self.reducer.advance(unit)
        elif unit.trained_buffers:
            self.reducer.hold(unit)

    def _gather_like_others(self, unit: ShardedUnit) -> None:
        """Take part in a gather that ranks need which use more of the unit's parameters."""
        again = self.order.is_gathered_again(unit.name, self.strategy)
        if self.strategy.shards_params and unit.trained_buffers and again:
            self.gatherer.use(unit)

    def end_backward(self) -> None:
        """Autograd has done all it had to do."""
        self.ledger.ranges.end_all()
        for unit in self._reduction[self._num_closed :]:
            self._let_go(unit)
            self._reduce(unit)
        self.gatherer.rest()
        if self.reduces:
            self.when_all_is_sent()
            self.reducer.finish()
        self.ledger.note(EventKind.LEAVE, self.root.name)
        self.holds_back, self._num_closed = not self.reduces, 0
        self.calls.end_backward(keeps_graph=self.backward.keeps_graph())
        self.backward.end()
        self._settle_order()
        self.trained.refuse_strays()

    def _settle_order(self) -> None:
        """After a backward through all units: plan them in the order in which they really ran."""
        seen = tuple(self.calls.order)
        if not self._learns_order or set(seen) != set(self.order.forward):
            return
        self._learns_order = False
        if seen != self.order.forward:
            warnings.warn(
                "the model runs its units in another order than it defines them: from now on they "
                f"are gathered ahead in the order {', '.join(seen)}",
                stacklevel=2,
            )
            self._follow(replace(self.order, forward=seen))
            self.reducer.units = self._reduction

    # ---- between steps -------------------------------------------------------------------

    def recover(self) -> None:
        """Clear what a backward left behind that ended in an exception."""
        self.ledger.ranges.end_all()
        self.reducer.abandon()
        self.gatherer.rest()
        self.calls.forget()
        self.holds_back = False
        self._num_closed = 0
        self.backward.end()

    def drop_gradients(self) -> None:
        """Forget all gradients, wherever they are."""
        if self.backward.has_failed:
            self.recover()
        self.reducer.drop_gradients()
        self.holds_back = self.lost_gradients = False

    def sync_gradients(self) -> None:
        """Reduce what was held back.

        Raises:
            EngineError: there is nothing that could be stepped with.
        """
        if self.backward.has_failed or self.lost_gradients:
            raise EngineError(
                "the gradients are incomplete, because a backward ended in an exception: call "
                "zero_grad() and compute them again"
            )
        if self.holds_back:
            self.reducer.advance()
            self.when_all_is_sent()
            self.reducer.finish()
            self.holds_back = False
        self.trained.refuse_strays()
        buffers = (buffer for unit in self.units.values() for buffer in unit.trained_buffers)
        if all(buffer.shard.grad is None for buffer in buffers):
            raise EngineError("sync_gradients: there are no gradients; call backward first")

    @torch.no_grad()
    def masters_changed(self, *, trained_only: bool = False) -> None:
        """The masters were written to: what was gathered from them is out of date."""
        self.gatherer.rest()
        self.renewal.start(trained_only=trained_only)
