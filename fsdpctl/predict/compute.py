"""What the computation of a pass allocates and frees, in the order in which it does.

A pass is a forward and its backward. It is cut where units begin and end. Its parts are observed on
a model with few blocks; those of a model with many follow, because blocks that are alike allocate
alike.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from fsdpctl.plan.work import Work


class Part(StrEnum):
    """Which part of a pass; only three belong to a unit."""

    BEFORE = "before"  # what is made before the model is called
    START = "start"  # until the first unit
    FORWARD = "forward"
    AROUND = "around"  # from the end of a unit's forward to the next unit, or the model's end
    LOSS = "loss"  # from the end of the model's forward to the first unit's backward
    BACKWARD = "backward"  # of a unit, and of what surrounds the units after it
    END = "end"  # when the backward is over


class Place(NamedTuple):
    """A part of a pass."""

    part: Part
    unit: str = ""  # "" where it belongs to none


class Made(NamedTuple):
    """A tensor got memory."""

    number: int  # of all that are made in its part
    nbytes: int
    what: str  # operator, dtype and shape


class Gone(NamedTuple):
    """A tensor's memory was given back."""

    place: Place  # where it was made
    number: int
    is_old: bool  # it was made in the pass before


class Passing(NamedTuple):
    """Memory that an operator takes while it runs."""

    nbytes: int
    what: str


class Gradient(NamedTuple):
    """A tensor has become the gradient of a parameter, and belongs to the engine."""

    place: Place  # where it was made
    number: int
    param: str


Happening = Made | Gone | Passing | Gradient


class Kept(NamedTuple):
    """A tensor that is made once and stays, such as a table of rotations."""

    place: Place
    nbytes: int
    what: str


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass like all but the first."""

    parts: Mapping[Place, Sequence[Happening]]
    kept: tuple[Kept, ...] = ()
    work: Mapping[Place, Sequence[Work]] = field(default_factory=dict)


# Of alike units in a row six are traced. Two at each end have other neighbours; the two in the
# middle must do the same, or the row is not as regular as it looked.
TRACED_OF_A_ROW = 6
_ENDS = 2


@dataclass(frozen=True, slots=True)
class Row:
    """Alike units one after another, and those of the traced model that stand for them."""

    traced: tuple[str, ...]
    whole: tuple[str, ...]

    def stand_in(self, index: int) -> int:
        """Which of `traced` does what the `index`-th of `whole` does."""
        count, length = len(self.traced), len(self.whole)
        if length == count or index < count - _ENDS:
            return index
        from_end = length - index
        return count - from_end if from_end <= _ENDS else count - _ENDS - 1

    def is_regular(self, passed: Pass) -> bool:
        """Whether the units in its middle do the same."""
        if len(self.whole) == len(self.traced):
            return True
        index = {name: number for number, name in enumerate(self.traced)}
        before, after = (
            [
                [_relative(each, index, number) for each in passed.parts.get(Place(part, name), ())]
                for part in (Part.FORWARD, Part.AROUND, Part.BACKWARD)
            ]
            for number, name in list(enumerate(self.traced))[_ENDS:-_ENDS]
        )
        return before == after


def _relative(each: Happening, index: Mapping[str, int], here: int) -> object:
    """`each` as it looks from the `here`-th unit of a row."""
    if isinstance(each, Made | Passing):
        return each
    unit = each.place.unit
    where = index[unit] - here if unit in index else unit
    last = each.is_old if isinstance(each, Gone) else "gradient"
    return (each.place.part, where, each.number, last)


Operation = tuple[int, int]  # a key, and the bytes it takes; 0: frees it; below 0: takes and frees


@dataclass(frozen=True, slots=True)
class Tensor:
    """Something that takes memory in a pass."""

    place: Place
    what: str


class Program:
    """A pass through the whole model as operations on an allocator."""

    def __init__(self, passed: Pass, units: Sequence[str], rows: Sequence[Row]) -> None:
        """`units`: of the whole model in the order of their forward."""
        self._passed = passed
        self._row_of = {name: row for row in rows for name in row.whole}
        self._index = {name: number for row in rows for number, name in enumerate(row.whole)}
        self._traced_index = {n: number for row in rows for number, n in enumerate(row.traced)}
        self._traced_row = {name: row for row in rows for name in row.traced}
        self._first_key: dict[Place, int] = {}
        self._sizes: list[int] = []
        self._tensors: list[Tensor] = []
        self.gradients: dict[str, int] = {}  # by parameter, the key of its gradient
        places = [Place(Part.BEFORE), Place(Part.START)]
        places += [Place(part, unit) for unit in units for part in (Part.FORWARD, Part.AROUND)]
        places.append(Place(Part.LOSS))
        places += [Place(Part.BACKWARD, unit) for unit in reversed(units)]
        places.append(Place(Part.END))
        for place in places:
            self._number(place)
        self.held_over: set[int] = set()  # keys of what outlives its pass, and goes in the next
        self.parts = {place: self._operations(place) for place in places}
        self.work = {place: self._work(place) for place in places}
        self.kept = tuple(
            Kept(Place(each.place.part, name), each.nbytes, each.what)
            for each in passed.kept
            for name in self._all_like(each.place.unit)
        )

    @property
    def num_keys(self) -> int:
        """Keys are the numbers below."""
        return len(self._sizes)

    def tensor(self, key: int) -> Tensor:
        """What a key stands for."""
        return self._tensors[key]

    def _source(self, place: Place) -> Sequence[Happening]:
        return self._passed.parts.get(Place(place.part, self._stand_in(place.unit)), ())

    def _work(self, place: Place) -> Sequence[Work]:
        """What is computed there."""
        return self._passed.work.get(Place(place.part, self._stand_in(place.unit)), ())

    def _stand_in(self, unit: str) -> str:
        row = self._row_of.get(unit)
        return row.traced[row.stand_in(self._index[unit])] if row else unit

    def _number(self, place: Place) -> None:
        self._first_key[place] = len(self._sizes)
        for each in self._source(place):
            if isinstance(each, Made):
                self._sizes.append(each.nbytes)
                self._tensors.append(Tensor(place, each.what))

    def _all_like(self, traced: str) -> tuple[str, ...]:
        """The units of the whole model that a traced one stands for."""
        row = self._traced_row.get(traced)
        if row is None:
            return (traced,)
        wanted = self._traced_index[traced]
        return tuple(n for i, n in enumerate(row.whole) if row.stand_in(i) == wanted)

    def _units_meant(self, traced: str, here: str) -> tuple[str, ...]:
        """The units that `traced` means, seen from the unit `here` of the whole model."""
        row = self._traced_row.get(traced)
        if row is None or self._row_of.get(here) is not row:
            return self._all_like(traced)
        shift = self._traced_index[traced] - row.stand_in(self._index[here])
        if abs(shift) > _ENDS:  # the other end is meant, not a neighbour
            return self._all_like(traced)
        return (row.whole[self._index[here] + shift],)

    def _operations(self, place: Place) -> list[Operation]:
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
            yield self._first_key[Place(each.place.part, unit)] + each.number

    def _params_meant(self, traced: str, here: str) -> list[str]:
        """The names in the whole model of what is a parameter's name in the traced one."""
        for owner in self._traced_row:
            if traced.startswith(f"{owner}."):
                return [unit + traced[len(owner) :] for unit in self._units_meant(owner, here)]
        return [traced]
