"""The running backward, and which forwards of units it and later ones still have to go through.

Autograd runs what is ready in descending order of creation. So once the backward of one call has
begun, that of every later call is over, whether it ran at all or not.

All ranks must draw the same conclusions, or they wait for each other in different collectives. So
the conclusions follow from the calls, not from their results: the gradients that arrived, or the
outputs that are still alive, differ if ranks use different parameters or outputs. If there were
several forwards since the last backward, each rank asks autograd which of them the next backward
goes through, and the ranks exchange the answers.
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

Agree = Callable[[Sequence[bool]], Sequence[bool]]

_NONE = -1
# The node of a parameter, which all forwards share.
_OF_PARAMETER = type(torch.ones(1, requires_grad=True).view(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


def current_backward() -> int:
    """Return the number of the backward that autograd runs on this thread, or -1."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    return current_backward() != _NONE


class OutermostBackward:
    """The backward in which others may be nested, such as those of re-entrant checkpointing."""

    def __init__(self) -> None:
        self._number = _NONE
        self._ending: ref[partial[None]] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether it has begun and not completed; it may have failed."""
        return self._number != _NONE

    @property
    def is_running(self) -> bool:
        """Whether it has begun and neither completed nor failed."""
        return self._ending is not None and self._ending() is not None

    @property
    def is_current(self) -> bool:
        """Whether autograd is in this backward, and not in a nested one."""
        return self._number == current_backward() != _NONE

    @property
    def has_failed(self) -> bool:
        """Whether it raised an exception: autograd has dropped the callback for its end."""
        return self.has_begun and not self.is_running

    def begin(self, on_end: Callable[[], None]) -> None:
        """Make the running backward the outermost one, and call `on_end()` when it is complete."""
        self._number = current_backward()
        ending = partial(on_end)  # a new object, to which autograd has the only reference
        self._ending = ref(ending)
        torch.autograd.Variable._execution_engine.queue_callback(ending)

    def end(self) -> None:
        self._number, self._ending = _NONE, None

    @staticmethod
    def keeps_graph() -> bool:
        return bool(torch._C._autograd._get_current_graph_task_keep_graph())


@dataclass(slots=True, weakref_slot=True, eq=False)
class GraphProbe:
    """Graph nodes that any backward through an output also goes through.

    The output's hook holds them. This makes no reference cycle with autograd's own reference to
    that hook, because the nodes are older than the output.
    """

    nodes: list[Node]


class ForwardPass:
    """A forward of the outermost module. It lives as long as its graph."""

    def __init__(self) -> None:
        self.numbers: dict[str, list[int]] = {}  # of its calls, by unit
        self.began_in: dict[int, int] = {}  # by call, the last backward that reached it
        self.takes_part = True  # in the running backward
        self._probes: WeakSet[GraphProbe] = WeakSet()
        self._borrowed: list[ref[GraphProbe]] = []  # they are witnesses of older outputs too
        self._unseen: list[Node] = []  # made of parameters alone: the next output's are theirs
        self._is_open = True
        self._is_unknown = False  # some output has no witness

    def probe(self, output: Tensor) -> GraphProbe | None:
        node = output.grad_fn
        for own, _ in () if node is None else node.next_functions:
            if own is not None and type(own) is not _OF_PARAMETER:
                found = GraphProbe([own, *self._unseen])
                self._probes.add(found)
                if self._unseen:
                    self._borrowed.append(ref(found))
                    self._unseen = []
                return found
        if node is not None and self._is_open:
            self._unseen.append(node)
        else:
            self._is_unknown = True
        return None

    def close(self) -> None:
        """End the forward: no later output can be a witness of earlier ones."""
        self._is_open = False
        self._is_unknown |= bool(self._unseen)
        self._unseen = []

    def is_in_backward(self) -> bool:
        """Return whether the backward on this thread goes through this forward.

        The answer is also True if some output has no witness, or no longer.
        """
        if self._is_unknown or any(each() is None for each in self._borrowed):
            return True
        executes = torch._C._will_engine_execute_node
        return any(executes(node) for each in self._probes for node in each.nodes)


@dataclass(slots=True)
class UnitCall:
    """One forward of a unit, numbered in the order of all calls."""

    forward: ForwardPass
    number: int


class BackwardTracker:
    """The calls of all units of one model."""

    def __init__(self) -> None:
        self.backward = 0  # the number of the running backward, or of the next one
        self._tracks = False  # whether the outermost module's forward makes a graph
        self._number = 0
        self.running = ForwardPass()  # the last one of the outermost module
        self._alive: WeakSet[ForwardPass] = WeakSet()
        self._recent: list[ref[ForwardPass]] = []  # with a graph, since the last backward ended
        self._hidden: set[str] = set()

    def begin_forward(self, *, tracks: bool) -> None:
        self.running.close()
        self.running = ForwardPass()
        self._tracks = tracks
        if tracks:
            self._recent.append(ref(self.running))

    def end_forward(self) -> None:
        self.running.close()

    def begin_backward(self, first: ForwardPass | None, agree: Agree) -> None:
        """Find the forwards that autograd goes through.

        The gradient of `first` came first; None if that ran within a backward. `agree` takes
        whether each of several forwards takes part here (empty: unknown), and returns whether on
        any rank.
        """
        recent = [each() for each in self._recent]
        # Autograd reports nothing about a backward around this one, and too little about one to
        # few inputs.
        is_known = first is not None and first.is_in_backward()
        for forward in self._alive:
            is_alone = recent == [forward]
            forward.takes_part = is_alone or not is_known or forward.is_in_backward()
        if len(recent) < 2:
            return
        own = [each is not None and each.takes_part for each in recent]
        for each, takes_part in zip(recent, agree(own if is_known else []), strict=False):
            if each is not None:
                each.takes_part = takes_part

    def record_forward(self, unit: str, *, tracks: bool) -> None:
        if self._tracks and not tracks:  # a backward within the backward may recompute it
            self._hidden.add(unit)

    def add_call(self, unit: str) -> UnitCall:
        """Record that a unit's forward made a tensor whose gradient may come."""
        self._number += 1
        self.running.numbers.setdefault(unit, []).append(self._number)
        self._alive.add(self.running)
        return UnitCall(self.running, self._number)

    def reach(self, call: UnitCall) -> None:
        """Record that backward has reached `call`; ModuleError if autograd did not report it."""
        if not call.forward.takes_part:
            raise ModuleError(
                "backward reached a forward that was not part of it when it began, so units may "
                "have been reduced without it; do not use a sharded model's older outputs in a "
                "function that runs a backward of its own within another"
            )
        call.forward.began_in[call.number] = self.backward

    def is_complete(self, unit: str, at: UnitCall) -> bool:
        """Return whether no backward of `unit` can follow the beginning of that of `at`."""
        if unit in self._hidden:
            return False
        return not any(
            number < at.number and forward.began_in.get(number) != self.backward
            for forward in self._alive
            if forward.takes_part
            for number in forward.numbers.get(unit, ())
        )

    def end_backward(self, *, keeps_graph: bool) -> None:
        """End the backward; without its graph, no other can go through the same forwards."""
        if not keeps_graph:
            done = [each for each in self._alive if self.backward in each.began_in.values()]
            self._alive.difference_update(done)
        self._start_over()

    def reset(self) -> None:
        """Forget all calls after a failure; a backward through one of them is still accepted."""
        for forward in self._alive:
            forward.takes_part = True
        self._alive.clear()
        self._start_over()

    def _start_over(self) -> None:
        self._hidden.clear()
        self._recent.clear()
        self.backward += 1


def agree_on_forwards(
    collectives: Collectives, takes_part: Sequence[bool], *, same_under: str | None
) -> Sequence[bool]:
    """Return which forwards take part in a backward on any rank. Collective.

    Here those in `takes_part` do; empty: unknown. `same_under` is the strategy, if it requires all
    ranks to go through the same ones: others would gather different units, a ModuleError.
    """
    found = collectives.all_gather_object(list(takes_part))
    if not all(found):
        return [True] * max(map(len, found))
    if same_under and any(each != found[0] for each in found):
        numbers = [[n for n, is_part in enumerate(each, 1) if is_part] for each in found]
        other = next(rank for rank, each in enumerate(found) if each != found[0])
        raise ModuleError(
            f"of {len(takes_part)} forwards, backward goes through {numbers[0]} on rank 0 and "
            f"through {numbers[other]} on rank {other}; {same_under} requires the same ones on "
            "all ranks (add the others' loss times zero)"
        )
    return [any(each) for each in zip(*found, strict=True)]
