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


class Part(StrEnum):
    """A kind of part of a pass; three of them belong to a unit."""

    BEFORE = "before"  # before the model is called
    START = "start"  # until the first unit
    FORWARD = "forward"
    AROUND = "around"  # from the end of a unit's forward to the next unit or the end of the model
    LOSS = "loss"  # from the end of the model's forward to the first unit's backward
    BACKWARD = "backward"  # of a unit, and of what surrounds the units, after it
    END = "end"  # when the backward is over


class PassPosition(NamedTuple):
    """A part of a pass."""

    part: Part
    unit: str = ""  # "": none


class Made(NamedTuple):
    """A tensor is allocated."""

    number: int  # among those made in its part
    nbytes: int
    what: str  # operator, dtype and shape


class Gone(NamedTuple):
    """A tensor is freed."""

    place: PassPosition  # where it was made
    number: int
    is_old: bool  # whether the pass before made it


class Passing(NamedTuple):
    """The workspace of an operator while it runs."""

    nbytes: int
    what: str


class Gradient(NamedTuple):
    """A tensor becomes the gradient of a parameter, which the engine frees."""

    place: PassPosition  # where it was made
    number: int
    param: str


Happening = Made | Gone | Passing | Gradient


class Kept(NamedTuple):
    """A tensor that is made once and kept, such as a table of rotations."""

    place: PassPosition
    nbytes: int
    what: str


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass that is not the first."""

    parts: Mapping[PassPosition, Sequence[Happening]]
    kept: tuple[Kept, ...] = ()
    work: Mapping[PassPosition, Sequence[Work]] = field(default_factory=dict)
    sent: Mapping[str, int] = field(default_factory=dict)  # bytes of inputs in host memory


# Of units in a row, two periods are traced between its ends, which are the first and the last of
# their kind, or have such a neighbor. Both must be equal, otherwise the row is not regular.


@dataclass(frozen=True, slots=True)
class UnitRow:
    """Units, each like the one `period` before it, and traced ones that represent them."""

    traced: tuple[str, ...]
    whole: tuple[str, ...]
    period: int = 1

    @property
    def ends(self) -> int:
        """The number of units at either end."""
        return self.period + 1

    def stand_in(self, index: int) -> int:
        """Return the index of the traced unit that represents unit `index` of the whole row."""
        count, from_end = len(self.traced), len(self.whole) - index
        last = count - self.ends - 1
        if len(self.whole) == count or index <= last:
            return index
        return count - from_end if from_end <= self.ends else last - (last - index) % self.period

    def is_regular(self, passed: Pass) -> bool:
        """Return whether the periods in the middle are equal."""
        if len(self.whole) == len(self.traced):
            return True
        index = {name: number for number, name in enumerate(self.traced)}
        middle = [
            [
                [
                    _relative(each, index, number)
                    for each in passed.parts.get(PassPosition(part, name), ())
                ]
                for part in (Part.FORWARD, Part.AROUND, Part.BACKWARD)
            ]
            for number, name in enumerate(self.traced)
        ][self.ends : -self.ends]
        return all(map(eq, middle, middle[self.period :]))


def traced_of(length: int, period: int) -> int:
    """Return how many units are traced of a row with `length` units."""
    ends = 2 * period + 2
    return min(length, ends + 2 * period + (length - ends) % period)


def _relative(each: Happening, index: Mapping[str, int], here: int) -> object:
    if isinstance(each, Made | Passing):
        return each
    unit = each.place.unit
    where = index[unit] - here if unit in index else unit
    last = each.is_old if isinstance(each, Gone) else "gradient"
    return (each.place.part, where, each.number, last)


Operation = tuple[int, int]  # a key and its bytes; 0: free; below 0: allocate and free


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a pass."""

    place: PassPosition
    what: str


class Program:
    """The pass through the whole model as operations on an allocator."""

    def __init__(self, passed: Pass, units: Sequence[str], rows: Sequence[UnitRow]) -> None:
        self.units = tuple(units)
        self._passed = passed
        self._row_of = {name: row for row in rows for name in row.whole}
        self._index = {name: number for row in rows for number, name in enumerate(row.whole)}
        self._traced_index = {n: number for row in rows for number, n in enumerate(row.traced)}
        self._traced_row = {name: row for row in rows for name in row.traced}
        self._first_key: dict[PassPosition, int] = {}
        self.tensors: list[Tensor] = []  # by key
        self.gradients: dict[str, int] = {}  # by parameter, the key of its gradient
        places = [
            PassPosition(Part.BEFORE),
            PassPosition(Part.START),
            *(PassPosition(part, unit) for unit in units for part in (Part.FORWARD, Part.AROUND)),
            PassPosition(Part.LOSS),
            *(PassPosition(Part.BACKWARD, unit) for unit in reversed(units)),
            PassPosition(Part.END),
        ]
        for place in places:
            self._number(place)
        self.held_over: set[int] = set()  # keys that outlive their pass and are freed in the next
        self.parts = {place: self._operations(place) for place in places}
        self.work = {each: passed.work.get(self._traced(each), ()) for each in places}
        sent = {unit: passed.sent.get(self._stand_in(unit), 0) for unit in units}
        self.sent = {unit: nbytes for unit, nbytes in sent.items() if nbytes}  # in forward order
        self.kept = tuple(
            Kept(PassPosition(each.place.part, name), each.nbytes, each.what)
            for each in passed.kept
            for name in self._all_like(each.place.unit)
        )

    @property
    def num_keys(self) -> int:
        """The number of keys, which count from 0."""
        return len(self.tensors)

    def _source(self, place: PassPosition) -> Sequence[Happening]:
        return self._passed.parts.get(self._traced(place), ())

    def _traced(self, place: PassPosition) -> PassPosition:
        return PassPosition(place.part, self._stand_in(place.unit))

    def _stand_in(self, unit: str) -> str:
        row = self._row_of.get(unit)
        return row.traced[row.stand_in(self._index[unit])] if row else unit

    def _number(self, place: PassPosition) -> None:
        self._first_key[place] = len(self.tensors)
        for each in self._source(place):
            if isinstance(each, Made):
                self.tensors.append(Tensor(place, each.what))

    def _all_like(self, traced: str) -> tuple[str, ...]:
        """Return the units of the whole model that a traced one represents."""
        row = self._traced_row.get(traced)
        if row is None:
            return (traced,)
        wanted = self._traced_index[traced]
        return tuple(n for i, n in enumerate(row.whole) if row.stand_in(i) == wanted)

    def _units_meant(self, traced: str, here: str) -> tuple[str, ...]:
        """Return the units that `traced` refers to, as seen from unit `here` of the whole model."""
        row = self._traced_row.get(traced)
        if row is None or self._row_of.get(here) is not row:
            return self._all_like(traced)
        shift = self._traced_index[traced] - row.stand_in(self._index[here])
        if abs(shift) > row.ends:  # the other end, not a neighbor
            return self._all_like(traced)
        return (row.whole[self._index[here] + shift],)

    def _operations(self, place: PassPosition) -> list[Operation]:
        operations: list[Operation] = []
        first = self._first_key[place]
        for each in self._source(place):
            if isinstance(each, Made):
                operations.append((first + each.number, each.nbytes))
            elif isinstance(each, Passing):
                operations.append((-1, -each.nbytes))
            elif isinstance(each, Gradient):
                names = self._params_meant(each.param, place.unit)
                self.gradients.update(zip(names, self._keys_meant(each, place.unit), strict=True))
            else:
                keys = list(self._keys_meant(each, place.unit))
                operations += [(key, 0) for key in keys]
                if each.is_old:
                    self.held_over.update(keys)
        return operations

    def _keys_meant(self, each: Gone | Gradient, here: str) -> Iterator[int]:
        for unit in self._units_meant(each.place.unit, here):
            yield self._first_key[PassPosition(each.place.part, unit)] + each.number

    def _params_meant(self, traced: str, here: str) -> list[str]:
        """Return the names in the whole model for a parameter of the traced one."""
        for owner in self._traced_row:
            if traced.startswith(f"{owner}."):
                return [unit + traced[len(owner) :] for unit in self._units_meant(owner, here)]
        return [traced]
