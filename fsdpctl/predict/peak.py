"""Replays steps on an allocator until it requests no more memory from the device."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from fsdpctl.predict.allocator import CachingAllocator, DeviceFullError
from fsdpctl.predict.compute import Operation
from fsdpctl.predict.memory_recorder import Item, MemoryRecorder, When
from fsdpctl.predict.recorder import Category, Steps

_MOST_STEPS = 5  # after which an allocator may still grow
_USUAL = 2  # the number of a step like all later ones
_LARGEST = 8  # kinds of tensors that are listed


@dataclass(frozen=True, slots=True)
class Constant:
    """Memory that is allocated once."""

    category: Category
    what: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Largest:
    """The tensors of one kind that exist at the peak."""

    category: Category
    what: str
    count: int
    nbytes: int  # in total


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment at which a rank holds most."""

    when: When
    breakdown: dict[Category, int]
    largest: tuple[Largest, ...]


class Script:
    """All that a rank allocates: building the model, then steps."""

    def __init__(
        self,
        recorder: MemoryRecorder,
        steps: Steps,
        *,
        draws: bool,
        constants: Sequence[Constant] = (),
    ) -> None:
        """Record the setup; `constants`, and tables that the first pass makes, stay allocated."""
        self._recorder = recorder
        self._steps = steps
        recorder.begin()
        steps.setup(draws=draws)
        for each in constants:
            recorder.allocate(each.category, "", each.what, each.nbytes)
        for kept in recorder.program.kept:
            recorder.allocate(Category.ACTIVATIONS, kept.place.unit, kept.what, kept.nbytes)
        self._lists = [recorder.operations]
        self._moments = [recorder.moments]

    def operations(self, number: int) -> Sequence[Operation]:
        """Return the operations of a step; 0: of building the model."""
        while len(self._lists) <= number:
            self._recorder.begin()
            self._steps.step()
            self._lists.append(self._recorder.operations)
            self._moments.append(self._recorder.moments)
        return self._lists[number]

    def when(self, number: int, index: int) -> When:
        """Return the moment of an operation."""
        moments = self._moments[number]
        return moments[bisect_right(moments, index, key=lambda each: each[0]) - 1][1]

    def moments(self, number: int) -> Sequence[tuple[int, When]]:
        """Return the index of the first operation of each moment of a step."""
        return self._moments[number]


class UnevenStepError(ValueError):
    """A traced step frees memory twice, as with blocks that keep tensors of other blocks."""


def replay(script: Script, allocator: CachingAllocator) -> None:
    """Replay steps until one needs nothing new."""
    before = (-1, -1)  # peaks
    for number in range(_MOST_STEPS + 1):
        for key, nbytes in script.operations(number):
            if nbytes > 0:
                allocator.allocate(key, nbytes)
            elif nbytes == 0:
                allocator.free(key)
            else:
                allocator.pass_through(key, -nbytes)
        now = (allocator.peak_allocated, allocator.peak_reserved)
        if number and now == before:
            return
        before = now if number else before


def can_run(script: Script, capacity: int, *, expandable: bool, streams: Mapping[int, int]) -> bool:
    """Return whether the steps run on a device of that size, perhaps by emptying the cache."""
    allocator = CachingAllocator(expandable=expandable, capacity=capacity, streams=streams)
    try:
        replay(script, allocator)
    except DeviceFullError:
        return False
    return True


def find_peak(script: Script, item: Callable[[int], Item], rounding: int) -> Peak:
    """Return the moment at which most is allocated, usually in a step that is not the first.

    Requests are rounded up to multiples of `rounding` bytes.
    """
    live: dict[int, int] = {}
    total = most = 0
    place = (0, 0)
    for number in range(_USUAL + 1):
        for index, (key, nbytes) in enumerate(script.operations(number)):
            now = total
            if nbytes > 0:
                live[key] = nbytes = -(-nbytes // rounding) * rounding
                now = total = total + nbytes
            elif nbytes:
                now = total - nbytes
            elif key in live:
                total -= live.pop(key)
            else:
                raise UnevenStepError(f"freed twice: {key}")
            if now > most or (now == most and number > place[0]):
                most, place = now, (number, index)
    number, last = place
    passing = max(0, -script.operations(number)[last][1])
    live = _alive(script, number, last + 1)
    breakdown = dict.fromkeys(Category, 0)
    kinds: Counter[tuple[Category, str]] = Counter()
    counts: Counter[tuple[Category, str]] = Counter()
    for found, nbytes in ((item(key), nbytes) for key, nbytes in live.items()):
        breakdown[found.category] += nbytes
        kinds[found.category, found.what] += nbytes
        counts[found.category, found.what] += 1
    breakdown[Category.WORKSPACES] += passing
    largest = tuple(
        Largest(category, what, counts[category, what], nbytes)
        for (category, what), nbytes in kinds.most_common(_LARGEST)
    )
    return Peak(script.when(*place), breakdown, largest)


def peaks_by_moment(
    script: Script, item: Callable[[int], Item]
) -> list[tuple[When, dict[Category, int]]]:
    """Return the bytes by category at the fullest point of every moment of a step."""
    live = _alive(script, _USUAL, 0)
    held = dict.fromkeys(Category, 0)
    for key, nbytes in live.items():
        held[item(key).category] += nbytes
    seen: list[tuple[When, dict[Category, int]]] = []
    operations, moments = script.operations(_USUAL), script.moments(_USUAL)
    ends = [begin for begin, _ in moments[1:]] + [len(operations)]
    for (begin, when), end in zip(moments, ends, strict=True):
        most, fullest = -1, dict(held)
        for key, nbytes in operations[begin:end]:
            if nbytes > 0:
                live[key] = nbytes
                held[item(key).category] += nbytes
            elif nbytes == 0:
                held[item(key).category] -= live.pop(key)
            total = sum(held.values())
            if nbytes >= 0 and total > most:
                most, fullest = total, dict(held)
            elif nbytes < 0 and total - nbytes > most:
                most = total - nbytes
                workspaces = held[Category.WORKSPACES] - nbytes
                fullest = {**held, Category.WORKSPACES: workspaces}
        seen.append((when, fullest))
    return seen


def _alive(script: Script, number: int, count: int) -> dict[int, int]:
    """Return the keys that are allocated after `count` operations of a step, with their bytes."""
    live: dict[int, int] = {}
    before = (script.operations(each) for each in range(number))
    for key, nbytes in chain(*before, script.operations(number)[:count]):
        if nbytes > 0:
            live[key] = nbytes
        elif nbytes == 0:
            del live[key]
    return live
