"""Tracks the forwards of units that the running backward and later backwards still visit.

A call is a forward of a unit. Autograd runs ready nodes in descending order of their creation. Once
autograd has reached the backward of a call, that of every later call is complete or not needed.

All ranks must decide alike that a unit is complete, or they would wait for each other in different
collectives. The decision therefore depends on the calls only. Gradients that arrived, and outputs
that are alive, can differ if ranks use different parameters or outputs. If there were several
forwards since the last backward, each rank asks autograd which of them the next backward visits,
and the ranks exchange the answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.autograd.graph import Node

from fsdpctl.comm.collectives import Collectives
from fsdpctl.errors import ModuleError

_NO_BACKWARD = -1
# The AccumulateGrad node of a parameter. All forwards share the node, so it identifies no forward.
_ACCUMULATE_GRAD = type(torch.ones(1, requires_grad=True).view(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


def current_backward() -> int:
    """Return the number of the backward that autograd runs on this thread, or -1."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    return current_backward() != _NO_BACKWARD


class OutermostBackward:
    """The outermost backward; re-entrant checkpointing nests other backwards in it."""

    def __init__(self) -> None:
        self._task_id = _NO_BACKWARD
        self._ending: ref[partial[None]] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a backward has begun and not completed; it may have failed."""
        return self._task_id != _NO_BACKWARD

    @property
    def is_running(self) -> bool:
        """Whether a backward has begun, and neither completed nor failed."""
        return self._ending is not None and self._ending() is not None

    @property
    def is_current(self) -> bool:
        """Whether autograd runs the outermost backward on this thread, not a nested one."""
        return self._task_id == current_backward() != _NO_BACKWARD

    @property
    def has_failed(self) -> bool:
        """Whether the backward raised an exception: autograd then drops its final callback."""
        return self.has_begun and not self.is_running

    def begin(self, on_end: Callable[[], None]) -> None:
        """Make the running backward the outermost one, and call `on_end()` when it is complete."""
        self._task_id = current_backward()
        # Autograd holds the only reference: this new object dies if autograd drops its callbacks.
        ending = partial(on_end)
        self._ending = ref(ending)
        torch.autograd.Variable._execution_engine.queue_callback(ending)

    def end(self) -> None:
        self._task_id, self._ending = _NO_BACKWARD, None


@dataclass(slots=True, weakref_slot=True, eq=False)
class GraphProbe:
    """The graph nodes that any backward through an output also visits.

    The hook of the output holds the probe, and the graph holds the hook. There is no reference
    cycle, because the nodes are older than the output. A cycle would keep the graph alive.
    """

    nodes: list[Node]


class ForwardPass:
    """A forward of the outermost module. The hooks of its outputs keep it alive with the graph."""

    def __init__(self) -> None:
        self.calls: dict[str, list[int]] = {}  # numbers of calls, by unit
        self.reached_in: dict[int, int] = {}  # the last backward that reached a call, by call
        self.takes_part = True  # whether the running backward visits this forward
        self._probes: WeakSet[GraphProbe] = WeakSet()
        self._shared_probes: list[ref[GraphProbe]] = []  # probes that also stand for older outputs
        # Outputs that depend on parameters alone; the probe of the next output stands for them.
        self._without_probe: list[Node] = []
        self._is_open = True
        self._is_unknown = False  # whether an output has no probe

    def probe(self, output: Tensor) -> GraphProbe | None:
        """Return a probe of `output`; None if the output depends on parameters alone."""
        node = output.grad_fn
        for older, _ in () if node is None else node.next_functions:
            if older is not None and type(older) is not _ACCUMULATE_GRAD:
                probe = GraphProbe([older, *self._without_probe])
                self._probes.add(probe)
                if self._without_probe:
                    self._shared_probes.append(ref(probe))
                    self._without_probe = []
                return probe
        if node is not None and self._is_open:
            self._without_probe.append(node)
        else:
            self._is_unknown = True
        return None

    def close(self) -> None:
        """End the forward: no later output can provide the probe of an earlier output."""
        self._is_open = False
        self._is_unknown |= bool(self._without_probe)
        self._without_probe = []

    def is_in_backward(self) -> bool:
        """Return whether the backward on this thread visits this forward.

        Also true if an output has no probe, or its probe was freed.
        """
        if self._is_unknown or any(each() is None for each in self._shared_probes):
            return True
        executes = torch._C._will_engine_execute_node
        return any(executes(node) for each in self._probes for node in each.nodes)


@dataclass(slots=True)
class UnitCall:
    """A forward of a unit, numbered in the order of all calls."""

    forward: ForwardPass
    number: int


class BackwardTracker:
    """A record of the calls of all units of a model, and of the calls that backward has reached."""

    def __init__(self, world: Collectives, required_by: str | None) -> None:
        """Create an empty record of the ranks `world`.

        `required_by` is a strategy that requires the same forwards on all ranks, because its ranks
        would otherwise gather different units.
        """
        self._world, self._required_by = world, required_by
        self.backward_count = 0  # completed backwards
        self._makes_graph = False  # whether the outermost module's forward makes a graph
        self._num_calls = 0
        self.last_forward = ForwardPass()  # in progress or complete
        self._alive: WeakSet[ForwardPass] = WeakSet()
        self._recent: list[ref[ForwardPass]] = []  # forwards with a graph since the last backward
        self._untracked_units: set[str] = set()

    def begin_forward(self, *, makes_graph: bool) -> None:
        self.last_forward.close()
        self.last_forward = ForwardPass()
        self._makes_graph = makes_graph
        if makes_graph:
            self._recent.append(ref(self.last_forward))

    def begin_backward(self, first_forward: ForwardPass | None) -> None:
        """Find the forwards that the new backward visits. Collective if there are several forwards.

        `first_forward` is the forward whose output got a gradient first; None: within a backward.
        """
        recent = [each() for each in self._recent]
        # Autograd only reports the nodes of the innermost backward. `torch.autograd.grad` with few
        # inputs does not visit all nodes, so a forward may have no reported node.
        is_known = first_forward is not None and first_forward.is_in_backward()
        for forward in self._alive:
            is_only = recent == [forward]
            forward.takes_part = is_only or not is_known or forward.is_in_backward()
        if len(recent) < 2:
            return
        local = [each is not None and each.takes_part for each in recent] if is_known else []
        # The answer is longer than `recent` if another rank ran more forwards.
        for each, takes_part in zip(recent, self._agree(local), strict=False):
            if each is not None:
                each.takes_part = takes_part

    def record_untracked(self, unit: str, *, grad_enabled: bool) -> None:
        """Record a unit that runs without a graph within a forward that makes a graph.

        A nested backward may recompute the unit.
        """
        if self._makes_graph and not grad_enabled:
            self._untracked_units.add(unit)

    def add_call(self, unit: str) -> UnitCall:
        """Record a forward of a unit that made a tensor which may get a gradient."""
        self._num_calls += 1
        self.last_forward.calls.setdefault(unit, []).append(self._num_calls)
        self._alive.add(self.last_forward)
        return UnitCall(self.last_forward, self._num_calls)

    def reach(self, call: UnitCall) -> None:
        """Record that backward has reached `call`; ModuleError if autograd did not report it."""
        if not call.forward.takes_part:
            raise ModuleError(
                "backward reached a forward that backward did not include at its start, so units "
                "may be reduced without the forward's gradients; do not use a sharded model's "
                "older outputs in a function that runs a backward of its own within another"
            )
        call.forward.reached_in[call.number] = self.backward_count

    def is_complete(self, unit: str, reached: UnitCall) -> bool:
        """Return whether backward no longer needs `unit` after reaching the call `reached`."""
        if unit in self._untracked_units:
            return False
        return not any(
            number < reached.number and forward.reached_in.get(number) != self.backward_count
            for forward in self._alive
            if forward.takes_part
            for number in forward.calls.get(unit, ())
        )

    def end_backward(self) -> None:
        """End the running backward. If it frees its graph, no other can visit its forwards."""
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            count = self.backward_count
            completed = [each for each in self._alive if count in each.reached_in.values()]
            self._alive.difference_update(completed)
        self._end()

    def reset(self) -> None:
        """Forget all calls after a failure. A later backward through one of them is allowed."""
        for forward in self._alive:
            forward.takes_part = True
        self._alive.clear()
        self._end()

    def _end(self) -> None:
        self._untracked_units.clear()
        self._recent.clear()
        self.backward_count += 1

    def _agree(self, takes_part: Sequence[bool]) -> Sequence[bool]:
        """Return which forwards take part in a backward on any rank. Collective.

        `takes_part` has whether each forward takes part on this rank (empty: unknown). ModuleError
        if the ranks differ and the strategy requires the same forwards.
        """
        answers = self._world.all_gather_values(list(takes_part))
        if not all(answers):
            return [True] * max(map(len, answers))
        if self._required_by and any(each != answers[0] for each in answers):
            numbers = [[n for n, is_part in enumerate(each, 1) if is_part] for each in answers]
            other = next(rank for rank, each in enumerate(answers) if each != answers[0])
            raise ModuleError(
                f"of {len(takes_part)} forwards, backward goes through {numbers[0]} on rank 0 and "
                f"through {numbers[other]} on rank {other}; {self._required_by} requires the same "
                "forwards on all ranks (add 0 * the losses of the other forwards)"
            )
        return [any(each) for each in zip(*answers, strict=True)]
