"""Plays steps on an allocator until it asks the device for no more."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fsdpctl.predict.allocator import CachingAllocator, DeviceFullError, PlainAllocator
from fsdpctl.predict.compute import Operation
from fsdpctl.predict.script import Category, Item, When, Writer

_MOST_STEPS = 5  # after which an allocator that still grows is taken as it is
_USUAL = 2  # the number of a step like all that follow
_LARGEST = 8  # how many kinds of tensors are named


class Steps(Protocol):
    """Writes what a rank does, under some engine."""

    def setup(self, *, draws: bool) -> None:
        """Build the model."""
        ...

    def step(self) -> None:
        """A step."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """Memory that is taken once."""

    category: Category
    what: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Largest:
    """Tensors of one kind that are there at the peak."""

    category: Category
    what: str
    count: int
    nbytes: int  # of all of them


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment at which a rank holds most."""

    when: When
    breakdown: dict[Category, int]
    largest: tuple[Largest, ...]


class Script:
    """Everything that a rank does: building the model, then steps."""

    def __init__(
        self, writer: Writer, steps: Steps, *, draws: bool, constants: Sequence[Constant] = ()
    ) -> None:
        """`constants` are made with the model, and stay; so do tables that the first pass makes."""
        self._writer = writer
        self._steps = steps
        steps.setup(draws=draws)
        for each in constants:
            writer.allocate(each.category, "", each.what, each.nbytes)
        for kept in writer.program.kept:
            writer.allocate(Category.ACTIVATIONS, kept.place.unit, kept.what, kept.nbytes)
        self._lists = [writer.operations]
        self._moments = [writer.moments]

    def operations(self, number: int) -> Sequence[Operation]:
        """Of a step; 0: of building the model."""
        while len(self._lists) <= number:
            self._steps.step()
            self._lists.append(self._writer.operations)
            self._moments.append(self._writer.moments)
        return self._lists[number]

    def when(self, number: int, index: int) -> When:
        """The moment of an operation."""
        moments = self._moments[number]
        return moments[bisect_right(moments, index, key=lambda each: each[0]) - 1][1]

    def moments(self, number: int) -> Sequence[tuple[int, When]]:
        """Where each moment of a step begins."""
        return self._moments[number]


def play(operations: Sequence[Operation], allocator: CachingAllocator | PlainAllocator) -> None:
    """Do what is written.

    Raises:
        DeviceFullError: the allocator cannot.
    """
    allocate, free, pass_through = allocator.allocate, allocator.free, allocator.pass_through
    for key, nbytes in operations:
        if nbytes > 0:
            allocate(key, nbytes)
        elif nbytes == 0:
            free(key)
        else:
            pass_through(key, -nbytes)


def settle(script: Script, allocator: CachingAllocator | PlainAllocator) -> int:
    """Play steps until one asks for nothing new; returns the number of steps.

    Raises:
        DeviceFullError: the allocator cannot.
    """
    play(script.operations(0), allocator)
    before = (-1, -1)  # peaks
    for number in range(1, _MOST_STEPS + 1):
        play(script.operations(number), allocator)
        now = (allocator.peak_allocated, allocator.peak_reserved)
        if now == before:
            return number
        before = now
    return _MOST_STEPS


def can_play(
    script: Script, capacity: int, *, expandable: bool, streams: Mapping[int, int]
) -> bool:
    """Whether a device of that size serves, if the allocator empties its cache when it is full."""
    allocator = CachingAllocator(expandable=expandable, capacity=capacity, streams=streams)
    try:
        settle(script, allocator)
    except DeviceFullError:
        return False
    return True


def find_peak(script: Script, item: Callable[[int], Item], rounding: int) -> Peak:
    """What is there when most is held, as a rule in a step that is not the first.

    Args:
        script: what the rank does.
        item: what a key stands for.
        rounding: bytes that each request is rounded up to a multiple of.
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
            elif nbytes == 0:
                total -= live.pop(key)
            else:
                now = total - nbytes
            if now > most or (now == most and number > place[0]):
                most, place = now, (number, index)
    number, last = place
    live = _alive_after(script, number - 1)
    passing = 0
    for key, nbytes in script.operations(number)[: last + 1]:
        passing = max(0, -nbytes)
        if nbytes > 0:
            live[key] = nbytes
        elif nbytes == 0:
            del live[key]
    return _peak(
        script.when(*place), [(item(key), nbytes) for key, nbytes in live.items()], passing
    )


def _peak(when: When, held: Sequence[tuple[Item, int]], passing: int) -> Peak:
    breakdown = dict.fromkeys(Category, 0)
    kinds: Counter[tuple[Category, str]] = Counter()
    counts: Counter[tuple[Category, str]] = Counter()
    for found, nbytes in held:
        breakdown[found.category] += nbytes
        kinds[found.category, found.what] += nbytes
        counts[found.category, found.what] += 1
    breakdown[Category.WORKSPACES] += passing
    largest = tuple(
        Largest(category, what, counts[category, what], nbytes)
        for (category, what), nbytes in kinds.most_common(_LARGEST)
    )
    return Peak(when, breakdown, largest)


def course(script: Script, item: Callable[[int], Item]) -> list[tuple[When, dict[Category, int]]]:
    """What is held, by category, at the fullest point of every moment of a step."""
    live = _alive_after(script, _USUAL - 1)
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


def _alive_after(script: Script, last: int) -> dict[int, int]:
    """What is there after step `last`, and its bytes."""
    live: dict[int, int] = {}
    for number in range(last + 1):
        for key, nbytes in script.operations(number):
            if nbytes > 0:
                live[key] = nbytes
            elif nbytes == 0:
                del live[key]
    return live
