"""One forward of the outermost module, and whether a backward goes through it."""

from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.autograd.graph import Node

# The node of a parameter, which all forwards share.
_OF_PARAMETER = type(torch.ones(1, requires_grad=True).view(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


class Witness:
    """Nodes by which to tell whether a backward comes to an output.

    Whatever comes to the output comes to them. The output's hook holds them; autograd's own
    reference to that hook makes no circle of it, because they are older than the output.
    """

    __slots__ = ("__weakref__", "nodes")

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes


class Forward:
    """One forward of the outermost module. Its graph keeps it; it is gone with all of that."""

    def __init__(self) -> None:
        self.numbers: dict[str, list[int]] = {}  # by unit, those of its calls
        self.began_in: dict[int, int] = {}  # by call, the last backward that came to it
        self.takes_part = True  # in the running backward
        self._witnesses: WeakSet[Witness] = WeakSet()
        self._borrowed: list[ref[Witness]] = []  # they speak for older outputs too
        self._unseen: list[Node] = []  # made of parameters alone: the next output speaks for them
        self._is_open = True
        self._is_unknown = False  # nothing speaks for some output

    def witness(self, output: Tensor) -> Witness | None:
        """For the hook of `output` to hold."""
        node = output.grad_fn
        for own, _ in () if node is None else node.next_functions:
            if own is not None and type(own) is not _OF_PARAMETER:
                found = Witness([own, *self._unseen])
                self._witnesses.add(found)
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
        """No output follows that could speak for others."""
        self._is_open = False
        self._is_unknown |= bool(self._unseen)
        self._unseen = []

    def is_in_backward(self) -> bool:
        """Whether the backward that autograd runs on this thread comes to it, as far as is known.

        It is said to where nothing speaks for an output, or what did is gone.
        """
        if self._is_unknown or any(each() is None for each in self._borrowed):
            return True
        executes = torch._C._will_engine_execute_node
        return any(executes(node) for each in self._witnesses for node in each.nodes)
