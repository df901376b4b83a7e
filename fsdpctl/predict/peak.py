"""The peak memory of a rank: its steps, replayed on an allocator until they need nothing new."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from fsdpctl.predict.allocator import CachingAllocator, DeviceFullError
from fsdpctl.predict.compute import Operation
from fsdpctl.predict.memory_recorder import Item, MemoryRecorder, When, without_gc
from fsdpctl.predict.recorder import Category, Steps

ALLOCATORS = ("expandable", "native")
_MOST_STEPS = 5  # after which an allocator may still grow
_USUAL = 2  # the number of a step like all later ones
_LARGEST = 8  # kinds of tensors that are listed
_ROUNDING = 512  # of CUDA's allocator


# Workspaces of cuBLAS, one for each of the two threads that call it, and their size on Hopper.
_CUBLAS, _CUBLAS_BYTES = 2, 32 << 20


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
        self, recorder: MemoryRecorder, steps: Steps, *, draws: bool, on_cuda: bool = False
    ) -> None:
        """Record the setup; workspaces of cuBLAS, and tables of the first pass, stay allocated."""
        self._recorder, self._steps = recorder, steps
        recorder.begin()
        steps.setup(draws=draws)
        for _ in range(_CUBLAS if on_cuda else 0):
            recorder.allocate(Category.WORKSPACES, "", "cuBLAS workspace", _CUBLAS_BYTES)
        for kept in recorder.program.kept:
            recorder.allocate(Category.ACTIVATIONS, kept.place.unit, kept.what, kept.nbytes)
        self._recorded = [(recorder.operations, recorder.moments)]

    def operations(self, number: int) -> Sequence[Operation]:
        """Return the operations of a step; 0: of building the model."""
        while len(self._recorded) <= number:
            self._recorder.begin()
            self._steps.step()
            self._recorded.append((self._recorder.operations, self._recorder.moments))
        return self._recorded[number][0]

    def when(self, number: int, index: int) -> When:
        _, moments = self._recorded[number]
        return moments[bisect_right(moments, index, key=lambda each: each[0]) - 1][1]


class UnevenStepError(ValueError):
    """A traced step frees memory twice, as with blocks that keep tensors of other blocks."""


def _highest(script: Script, rounding: int) -> tuple[int, int, int]:
    """Return the step and the operation after which most is allocated, and what only passes."""
    total = most = passing = 0
    place = (0, 0)
    live: dict[int, int] = {}
    for number in range(_USUAL + 1):
        for index, (key, nbytes) in enumerate(script.operations(number)):
            more = 0
            if nbytes > 0:
                live[key] = size = -(-nbytes // rounding) * rounding
                total += size
            elif nbytes:
                more = -nbytes
            elif key in live:
                total -= live.pop(key)
                continue
            else:
                raise UnevenStepError(f"freed twice: {key}")
            if total + more >= most and (total + more > most or number > place[0]):
                most, passing, place = total + more, more, (number, index)
    return *place, passing


def find_peak(script: Script, item: Callable[[int], Item], rounding: int) -> Peak:
    """Return the moment at which most is allocated, usually in a step that is not the first.

    Requests are rounded up to multiples of `rounding` bytes.
    """
    number, index, passing = _highest(script, rounding)
    live: dict[int, int] = {}
    before = chain.from_iterable(map(script.operations, range(number)))
    for key, nbytes in chain(before, script.operations(number)[: index + 1]):
        if nbytes > 0:
            live[key] = nbytes
        elif not nbytes:
            del live[key]
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
    return Peak(script.when(number, index), breakdown, largest)


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


@dataclass(frozen=True)
class StepEstimate:
    """The peak memory of a rank, in bytes, and its moment."""

    device: str
    allocator: str  # of the run
    peak: Peak
    script: Script
    recorder: MemoryRecorder

    @cached_property
    def _peaks(self) -> tuple[int, int]:
        """By the run's allocator, which take longer to know than `peak`."""
        return self._replayed(self.allocator)

    def _replayed(self, name: str) -> tuple[int, int]:
        """Return the peaks of an allocator; on the CPU, requests are allocated as they are."""
        if self.device == "cpu":
            return (sum(self.peak.breakdown.values()),) * 2
        with without_gc():
            replay(self.script, allocator := self._new_allocator(name))
        return allocator.peak_allocated, allocator.peak_reserved

    def _new_allocator(self, name: str, capacity: int | None = None) -> CachingAllocator:
        grows, streams = name == "expandable", self.recorder.streams
        return CachingAllocator(expandable=grows, capacity=capacity, streams=streams)

    @property
    def allocated(self) -> int:
        return self._peaks[0]

    @property
    def peak_reserved(self) -> int:
        return self._peaks[1]

    @property
    def reserved(self) -> dict[str, int]:
        """Bytes by allocator; the one that the run does not use is replayed now."""
        return {
            name: self.peak_reserved if name == self.allocator else self._replayed(name)[1]
            for name in ALLOCATORS
        }

    @property
    def breakdown(self) -> dict[str, int]:
        """Bytes at the peak by category; their sum is `allocated`."""
        parts = {category.value: nbytes for category, nbytes in self.peak.breakdown.items()}
        return {**parts, "rounding": self.allocated - sum(parts.values())}

    def verdict(self, available: int) -> str:
        """Return `fits`, `thrashes` (only by emptying the allocator's cache) or `too_large`.

        A script that does not simply fit is replayed on a device with `available` bytes.
        """
        if sum(self.peak.breakdown.values()) > available:  # which are allocated, at least
            return "too_large"
        if self.peak_reserved <= available:
            return "fits"
        if self.device == "cpu" or self.allocated > available:
            return "too_large"
        try:
            replay(self.script, self._new_allocator(self.allocator, available))
        except DeviceFullError:
            return "too_large"
        return "thrashes"

    def to_dict(self) -> dict[str, Any]:
        """Return the part of `estimate-memory --json` that every module has."""
        return {
            "peak_allocated_bytes": self.allocated, "peak_reserved_bytes": self.peak_reserved,
            "allocator": self.allocator, "reserved_bytes": self.reserved,
            "breakdown": self.breakdown, "peak_at": str(self.peak.when),
            "largest": [
                {"category": x.category.value, "what": x.what, "count": x.count, "bytes": x.nbytes}
                for x in self.peak.largest
            ],
            "counts_activations": True,
        }  # fmt: skip


def estimate_steps(
    recorder: MemoryRecorder, steps: Steps, *, device: str, allocator: str, draws: bool
) -> StepEstimate:
    """Replay `steps`, which record in `recorder`, until they need nothing new.

    On `device` cpu, requests are not rounded. `draws`: the model is initialized on the device.
    """
    on_cuda = device == "cuda"
    with without_gc():
        script = Script(recorder, steps, draws=draws, on_cuda=on_cuda)
        peak = find_peak(script, recorder.item, _ROUNDING if on_cuda else 1)
    return StepEstimate(device, allocator, peak, script, recorder)
