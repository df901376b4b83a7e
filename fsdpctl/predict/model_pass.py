"""The operators of a forward-backward pass, and what they allocate and free, in order.

A pass is a forward and its backward. It is cut where units begin and end. Its parts are observed on
a model with few blocks; those of a model with many follow, because blocks that are alike allocate
alike.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import eq
from typing import NamedTuple


class WorkKind(StrEnum):
    """The limit of an operator's speed."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    ATTENTION_BACKWARD = "attention backward"
    MEMORY = "memory"  # reading and writing
    EXCHANGE = "exchange"  # between ranks that share each sample


class Work(NamedTuple):
    """One operator, by its name in torch.

    `dims` are batch, rows, columns and the length of the sums of a matrix product; batch, heads,
    length and width of attention, whose `flops` count what a causal mask leaves. The last is that
    of the rows that are added to each row of a tensor in turn, by index.
    """

    name: str
    kind: WorkKind
    flops: int
    nbytes: int  # read and written, each tensor once
    itemsize: int  # bytes of an element that is multiplied
    dims: tuple[int, int, int, int] = (0, 0, 0, 0)


class PassPart(StrEnum):
    """A kind of part of a pass; three of them belong to a unit."""

    BEFORE = "before"  # before the model is called
    START = "start"  # until the first unit
    FORWARD = "forward"
    BETWEEN = "around"  # from the end of a unit's forward to the next unit or the end of the model
    LOSS = "loss"  # from the end of the model's forward to the first unit's backward
    BACKWARD = "backward"  # of a unit, and of what surrounds the units, after it
    END = "end"  # when the backward is over


class PassPosition(NamedTuple):
    """A part of a pass."""

    part: PassPart
    unit: str = ""  # "": none


class Alloc(NamedTuple):
    """A tensor is allocated."""

    ordinal: int  # among those made in its part
    nbytes: int
    description: str  # operator, dtype and shape


class Free(NamedTuple):
    """A tensor is freed."""

    position: PassPosition  # where it was made
    ordinal: int
    from_previous_pass: bool  # whether the pass before made it


class Workspace(NamedTuple):
    """The workspace of an operator while it runs."""

    nbytes: int
    description: str


class Gradient(NamedTuple):
    """A tensor becomes the gradient of a parameter, which the engine frees."""

    position: PassPosition  # where it was made
    ordinal: int
    param: str


MemoryEvent = Alloc | Free | Workspace | Gradient


class CachedTensor(NamedTuple):
    """A tensor that is made once and kept, such as a table of rotations."""

    position: PassPosition
    nbytes: int
    description: str


@dataclass(frozen=True, slots=True)
class TracedPass:
    """A pass that is not the first."""

    parts: Mapping[PassPosition, Sequence[MemoryEvent]]
    cached: tuple[CachedTensor, ...] = ()
    work: Mapping[PassPosition, Sequence[Work]] = field(default_factory=dict)
    offloaded: Mapping[str, int] = field(default_factory=dict)  # bytes of inputs in host memory


# Of units in a row, two periods are traced between its ends, which are the first and the last of
# their kind, or have such a neighbor. Both must be equal, otherwise the row is not regular.


@dataclass(frozen=True, slots=True)
class RepeatedUnits:
    """Units, each like the one `period` before it, and traced ones that represent them."""

    traced: tuple[str, ...]
    units: tuple[str, ...]
    period: int = 1

    @property
    def edge(self) -> int:
        """The number of units at either end."""
        return self.period + 1

    def stand_in(self, index: int) -> int:
        """Return the index of the traced unit that represents unit `index` of the whole row."""
        count, from_end = len(self.traced), len(self.units) - index
        last = count - self.edge - 1
        if len(self.units) == count or index <= last:
            return index
        return count - from_end if from_end <= self.edge else last - (last - index) % self.period

    def is_regular(self, passed: TracedPass) -> bool:
        """Return whether the periods in the middle are equal."""
        if len(self.units) == len(self.traced):
            return True
        index = {name: number for number, name in enumerate(self.traced)}
        middle = [
            [
                [
                    _relative(each, index, number)
                    for each in passed.parts.get(PassPosition(part, name), ())
                ]
                for part in (PassPart.FORWARD, PassPart.BETWEEN, PassPart.BACKWARD)
            ]
            for number, name in enumerate(self.traced)
        ][self.edge : -self.edge]
        return all(map(eq, middle, middle[self.period :]))


def num_traced(length: int, period: int) -> int:
    """Return how many units are traced of a row with `length` units."""
    ends = 2 * period + 2
    return min(length, ends + 2 * period + (length - ends) % period)


def _relative(each: MemoryEvent, index: Mapping[str, int], here: int) -> object:
    if isinstance(each, Alloc | Workspace):
        return each
    unit = each.position.unit
    where = index[unit] - here if unit in index else unit
    last = each.from_previous_pass if isinstance(each, Free) else "gradient"
    return (each.position.part, where, each.ordinal, last)


Operation = tuple[int, int]  # a key and its bytes; 0: free; below 0: allocate and free


@dataclass(frozen=True, slots=True)
class TensorOrigin:
    """A tensor of a pass."""

    position: PassPosition
    description: str


class ModelPass:
    """The pass through the whole model as operations on an allocator."""

    def __init__(
        self, passed: TracedPass, units: Sequence[str], rows: Sequence[RepeatedUnits]
    ) -> None:
        self.units = tuple(units)
        self._passed = passed
        self._repeated = {name: row for row in rows for name in row.units}
        self._index = {name: number for row in rows for number, name in enumerate(row.units)}
        self._traced_index = {n: number for row in rows for number, n in enumerate(row.traced)}
        self._traced_repeated = {name: row for row in rows for name in row.traced}
        self._first_key: dict[PassPosition, int] = {}
        self.tensors: list[TensorOrigin] = []  # by key
        self.gradients: dict[str, int] = {}  # by parameter, the key of its gradient
        positions = [
            PassPosition(PassPart.BEFORE),
            PassPosition(PassPart.START),
            *(
                PassPosition(part, unit)
                for unit in units
                for part in (PassPart.FORWARD, PassPart.BETWEEN)
            ),
            PassPosition(PassPart.LOSS),
            *(PassPosition(PassPart.BACKWARD, unit) for unit in reversed(units)),
            PassPosition(PassPart.END),
        ]
        for position in positions:
            self._number(position)
        self.held_over: set[int] = set()  # keys that outlive their pass and are freed in the next
        self.parts = {position: self._operations(position) for position in positions}
        self.work = {each: passed.work.get(self._traced(each), ()) for each in positions}
        sent = {unit: passed.offloaded.get(self._representative(unit), 0) for unit in units}
        self.offloaded = {
            unit: nbytes for unit, nbytes in sent.items() if nbytes
        }  # in forward order
        self.cached = tuple(
            CachedTensor(PassPosition(each.position.part, name), each.nbytes, each.description)
            for each in passed.cached
            for name in self._all_represented(each.position.unit)
        )

    @property
    def num_keys(self) -> int:
        """The number of keys, which count from 0."""
        return len(self.tensors)

    def _events(self, position: PassPosition) -> Sequence[MemoryEvent]:
        return self._passed.parts.get(self._traced(position), ())

    def _traced(self, position: PassPosition) -> PassPosition:
        return PassPosition(position.part, self._representative(position.unit))

    def _representative(self, unit: str) -> str:
        row = self._repeated.get(unit)
        return row.traced[row.stand_in(self._index[unit])] if row else unit

    def _number(self, position: PassPosition) -> None:
        self._first_key[position] = len(self.tensors)
        for each in self._events(position):
            if isinstance(each, Alloc):
                self.tensors.append(TensorOrigin(position, each.description))

    def _all_represented(self, traced: str) -> tuple[str, ...]:
        """Return the units of the whole model that a traced one represents."""
        row = self._traced_repeated.get(traced)
        if row is None:
            return (traced,)
        wanted = self._traced_index[traced]
        return tuple(n for i, n in enumerate(row.units) if row.stand_in(i) == wanted)

    def _units_referred_to(self, traced: str, here: str) -> tuple[str, ...]:
        """Return the units that `traced` refers to, as seen from unit `here` of the whole model."""
        row = self._traced_repeated.get(traced)
        if row is None or self._repeated.get(here) is not row:
            return self._all_represented(traced)
        shift = self._traced_index[traced] - row.stand_in(self._index[here])
        if abs(shift) > row.edge:  # the other end, not a neighbor
            return self._all_represented(traced)
        return (row.units[self._index[here] + shift],)

    def _operations(self, position: PassPosition) -> list[Operation]:
        operations: list[Operation] = []
        first = self._first_key[position]
        for each in self._events(position):
            if isinstance(each, Alloc):
                operations.append((first + each.ordinal, each.nbytes))
            elif isinstance(each, Workspace):
                operations.append((-1, -each.nbytes))
            elif isinstance(each, Gradient):
                names = self._params_referred_to(each.param, position.unit)
                self.gradients.update(
                    zip(names, self._keys_referred_to(each, position.unit), strict=True)
                )
            else:
                keys = list(self._keys_referred_to(each, position.unit))
                operations += [(key, 0) for key in keys]
                if each.from_previous_pass:
                    self.held_over.update(keys)
        return operations

    def _keys_referred_to(self, each: Free | Gradient, here: str) -> Iterator[int]:
        for unit in self._units_referred_to(each.position.unit, here):
            yield self._first_key[PassPosition(each.position.part, unit)] + each.ordinal

    def _params_referred_to(self, traced: str, here: str) -> list[str]:
        """Return the names in the whole model for a parameter of the traced one."""
        for owner in self._traced_repeated:
            if traced.startswith(f"{owner}."):
                return [
                    unit + traced[len(owner) :] for unit in self._units_referred_to(owner, here)
                ]
        return [traced]
