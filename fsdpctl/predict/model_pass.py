"""The operators of a forward-backward pass, and their allocations and frees, in order.

A pass is a forward and its backward. It is cut into parts where units begin and end. The parts are
traced on a model with few blocks. Those of a model with many blocks are derived from the trace,
because equal blocks allocate equal memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import eq
from typing import NamedTuple


class WorkKind(StrEnum):
    """The kind of an operator's work, which determines the limit of its speed."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    ATTENTION_BACKWARD = "attention backward"
    MEMORY = "memory"  # reads and writes
    EXCHANGE = "exchange"  # all-to-all between the ranks of a context-parallel group


class Work(NamedTuple):
    """The work of one operator, by its name in torch.

    `dims` of a matrix product are batch, rows, columns and the inner dimension. `dims` of attention
    are batch, heads, length and head dimension; `flops` of attention exclude masked products. For
    `index_put`, `dims[3]` is how many rows are added to the same row, one after another.
    """

    name: str
    kind: WorkKind
    flops: int
    nbytes: int  # read and written, each tensor once
    itemsize: int  # bytes of an element of the operands
    dims: tuple[int, int, int, int] = (0, 0, 0, 0)


class PassPart(StrEnum):
    """A kind of part of a pass. FORWARD, BETWEEN and BACKWARD are parts of a unit."""

    BEFORE = "before"  # before the model is called
    START = "start"  # until the first unit
    FORWARD = "forward"
    BETWEEN = "between"  # from the end of a unit's forward to the next unit or the model's end
    LOSS = "loss"  # from the end of the model's forward to the first unit's backward
    BACKWARD = "backward"  # backward of a unit, and of operators between it and the previous unit
    END = "end"  # after the backward


class PassPosition(NamedTuple):
    """A part of a pass, and its unit."""

    part: PassPart
    unit: str = ""  # empty if the part belongs to no unit


class Alloc(NamedTuple):
    """An allocation of a tensor."""

    ordinal: int  # among the allocations of its part
    nbytes: int
    description: str  # operator, dtype and shape


class Free(NamedTuple):
    """A free of a tensor."""

    position: PassPosition  # where it was allocated
    ordinal: int
    is_previous: bool  # whether it was allocated in the previous pass


class Workspace(NamedTuple):
    """The workspace of an operator, which is allocated while the operator runs."""

    nbytes: int
    description: str


class BecomesGradient(NamedTuple):
    """The event that a tensor becomes a parameter's gradient; the engine frees the gradient."""

    position: PassPosition  # where it was allocated
    ordinal: int
    param: str


MemoryEvent = Alloc | Free | Workspace | BecomesGradient


class CachedTensor(NamedTuple):
    """A tensor that is allocated once and stays, such as a table of rotary embeddings."""

    position: PassPosition
    nbytes: int
    description: str


@dataclass(frozen=True, slots=True)
class TracedPass:
    """The trace of a pass other than the first, through a model with few blocks."""

    events: Mapping[PassPosition, Sequence[MemoryEvent]]
    cached: tuple[CachedTensor, ...] = ()
    work: Mapping[PassPosition, Sequence[Work]] = field(default_factory=dict)
    # Bytes of a unit's input in host memory, by unit.
    offloaded: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RepeatedUnits:
    """The consecutive units that repeat every `period` units, and the traced units for them.

    `traced` are names in the traced model, `units` names in the whole model. Both edges and two
    periods in the middle are traced. Units at the edges may differ, because they are the first or
    the last of a kind or next to such a unit. If the two periods differ, all units are traced.
    """

    traced: tuple[str, ...]
    units: tuple[str, ...]
    period: int = 1

    @property
    def edge(self) -> int:
        """The number of units at either edge that represent only themselves."""
        return self.period + 1

    def representative(self, index: int) -> int:
        """Return the index of the traced unit that represents unit `index`."""
        count, from_end = len(self.traced), len(self.units) - index
        last = count - self.edge - 1  # the last traced unit before the edge
        if len(self.units) == count or index <= last:
            return index
        # A unit in the middle is represented by the unit at the same place of the last period.
        return count - from_end if from_end <= self.edge else last - (last - index) % self.period

    def is_regular(self, traced: TracedPass) -> bool:
        """Return whether the traced periods in the middle are equal."""
        if len(self.units) == len(self.traced):
            return True
        index = {name: i for i, name in enumerate(self.traced)}
        middle = [
            [
                [_relative(x, index, i) for x in traced.events.get(PassPosition(part, name), ())]
                for part in (PassPart.FORWARD, PassPart.BETWEEN, PassPart.BACKWARD)
            ]
            for i, name in enumerate(self.traced)
        ][self.edge : -self.edge]
        return all(map(eq, middle, middle[self.period :]))


def num_traced(length: int, period: int) -> int:
    """Return how many of `length` repeated units are traced."""
    edges = 2 * period + 2
    # With the remainder, the last edge begins at the same place in a period as in the model.
    return min(length, edges + 2 * period + (length - edges) % period)


def _relative(each: MemoryEvent, index: Mapping[str, int], current: int) -> object:
    """Return an event of the traced unit `current`, with other traced units as distances to it."""
    if isinstance(each, Alloc | Workspace):
        return each
    unit = each.position.unit
    relative = index[unit] - current if unit in index else unit
    kind = each.is_previous if isinstance(each, Free) else "gradient"
    return (each.position.part, relative, each.ordinal, kind)


# A tensor's key and its bytes. 0 bytes: a free; below 0: allocated and freed at once.
Operation = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TensorOrigin:
    """The operator that allocates a tensor, and its position in the pass."""

    position: PassPosition
    description: str


class ModelPass:
    """A pass through the whole model, as operations on an allocator."""

    def __init__(
        self, traced: TracedPass, units: Sequence[str], repetitions: Sequence[RepeatedUnits]
    ) -> None:
        self.units = tuple(units)
        self._traced_pass = traced
        # Two maps of the units of the whole model, and two of the traced units.
        self._repeated = {name: each for each in repetitions for name in each.units}
        self._index = {name: index for each in repetitions for index, name in enumerate(each.units)}
        self._traced_index = {name: i for each in repetitions for i, name in enumerate(each.traced)}
        self._traced_repeated = {name: each for each in repetitions for name in each.traced}
        self._first_key: dict[PassPosition, int] = {}
        self.tensors: list[TensorOrigin] = []  # index: key
        self.gradients: dict[str, int] = {}  # key of the gradient, by parameter
        forward = (PassPart.FORWARD, PassPart.BETWEEN)
        positions = [
            PassPosition(PassPart.BEFORE),
            PassPosition(PassPart.START),
            *(PassPosition(part, unit) for unit in units for part in forward),
            PassPosition(PassPart.LOSS),
            *(PassPosition(PassPart.BACKWARD, unit) for unit in reversed(units)),
            PassPosition(PassPart.END),
        ]
        for position in positions:
            self._first_key[position] = len(self.tensors)
            allocs = (each for each in self._events(position) if isinstance(each, Alloc))
            self.tensors += [TensorOrigin(position, each.description) for each in allocs]
        self.outliving: set[int] = set()  # keys that are freed in the next pass
        # Fills `gradients` and `outliving`, too.
        self.operations = {position: self._operations(position) for position in positions}
        self.work = {each: traced.work.get(self._traced_position(each), ()) for each in positions}
        sizes = {unit: traced.offloaded.get(self._representative(unit), 0) for unit in units}
        # In the order of the forward.
        self.offloaded = {unit: nbytes for unit, nbytes in sizes.items() if nbytes}
        self.cached = tuple(
            CachedTensor(PassPosition(each.position.part, name), each.nbytes, each.description)
            for each in traced.cached
            for name in self._all_represented(each.position.unit)
        )

    @property
    def num_keys(self) -> int:
        """The number of tensors; their keys are 0, 1, 2 …"""
        return len(self.tensors)

    def _events(self, position: PassPosition) -> Sequence[MemoryEvent]:
        return self._traced_pass.events.get(self._traced_position(position), ())

    def _traced_position(self, position: PassPosition) -> PassPosition:
        return PassPosition(position.part, self._representative(position.unit))

    def _representative(self, unit: str) -> str:
        repeated = self._repeated.get(unit)
        return repeated.traced[repeated.representative(self._index[unit])] if repeated else unit

    def _all_represented(self, traced: str) -> tuple[str, ...]:
        """Return the units of the whole model that a traced unit represents."""
        repeated = self._traced_repeated.get(traced)
        if repeated is None:
            return (traced,)
        index = self._traced_index[traced]
        return tuple(n for i, n in enumerate(repeated.units) if repeated.representative(i) == index)

    def _referred_units(self, traced: str, unit: str) -> tuple[str, ...]:
        """Map a traced unit, named in an event of `unit`, to units of the whole model.

        A neighbor of `unit` is the unit at the same distance. From elsewhere, such as the loss, the
        traced unit stands for all units that it represents."""
        repeated = self._traced_repeated.get(traced)
        if repeated is None or self._repeated.get(unit) is not repeated:
            return self._all_represented(traced)
        shift = self._traced_index[traced] - repeated.representative(self._index[unit])
        if abs(shift) > repeated.edge:  # at the other edge, not a neighbor
            return self._all_represented(traced)
        return (repeated.units[self._index[unit] + shift],)

    def _operations(self, position: PassPosition) -> list[Operation]:
        operations: list[Operation] = []
        first = self._first_key[position]
        for each in self._events(position):
            if isinstance(each, Alloc):
                operations.append((first + each.ordinal, each.nbytes))
            elif isinstance(each, Workspace):
                operations.append((-1, -each.nbytes))
            elif isinstance(each, BecomesGradient):
                params = self._referred_params(each.param, position.unit)
                keys = self._referred_keys(each, position.unit)
                self.gradients.update(zip(params, keys, strict=True))
            else:
                keys = self._referred_keys(each, position.unit)
                operations += [(key, 0) for key in keys]
                if each.is_previous:
                    self.outliving.update(keys)
        return operations

    def _referred_keys(self, each: Free | BecomesGradient, here: str) -> list[int]:
        units, part = self._referred_units(each.position.unit, here), each.position.part
        return [self._first_key[PassPosition(part, unit)] + each.ordinal for unit in units]

    def _referred_params(self, traced: str, here: str) -> list[str]:
        """Return the parameters of the whole model that a traced parameter represents."""
        for owner in self._traced_repeated:
            if traced.startswith(f"{owner}."):
                return [unit + traced[len(owner) :] for unit in self._referred_units(owner, here)]
        return [traced]
