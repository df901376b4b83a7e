"""The peak memory of a rank, from steps that are replayed on an allocator."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from fsdpctl.io.resources import without_gc
from fsdpctl.predict.allocator import CachingAllocator, DeviceFullError
from fsdpctl.predict.memory_recorder import MemoryRecorder, Purpose, StepPhase
from fsdpctl.predict.model_pass import Operation
from fsdpctl.predict.step_recorder import Category, Steps

ALLOCATORS = ("expandable", "native")
_MAX_REPLAYED_STEPS = 5  # the allocator may still grow in later steps
_STEADY_STEP = 2  # later steps have the same operations as this step
_MOST_LISTED = 8  # kinds of tensors
_ROUNDING = 512  # bytes, of CUDA's allocator
# cuBLAS has a workspace for each of the two threads that call it. Its bytes are those on Hopper.
_CUBLAS_WORKSPACES, _CUBLAS_BYTES = 2, 32 << 20


@dataclass(frozen=True, slots=True)
class LargestTensors:
    """The tensors of one kind that exist at the peak."""

    category: Category
    description: str
    count: int
    nbytes: int  # in total


@dataclass(frozen=True, slots=True)
class Peak:
    """The phase of a step in which a rank has allocated most, and its allocations."""

    phase: StepPhase
    breakdown: dict[Category, int]
    largest: tuple[LargestTensors, ...]


class AllocationTrace:
    """The allocations and frees of a rank; a step is recorded on the first access to it."""

    def __init__(self, recorder: MemoryRecorder, steps: Steps, *, draws: bool, cuda: bool) -> None:
        """Record the setup, with the workspaces of cuBLAS and the cached tensors of the pass."""
        self._recorder, self._steps = recorder, steps
        recorder.begin()
        steps.setup(draws=draws)
        for _ in range(_CUBLAS_WORKSPACES if cuda else 0):
            recorder.allocate(Category.WORKSPACES, "", "cuBLAS workspace", _CUBLAS_BYTES)
        for each in recorder.model_pass.cached:
            category, unit = Category.ACTIVATIONS, each.position.unit
            recorder.allocate(category, unit, each.description, each.nbytes)
        self._recorded = [(recorder.operations, recorder.phases)]

    def operations(self, number: int) -> Sequence[Operation]:
        """Return the operations of a step; step 0 builds the model."""
        while len(self._recorded) <= number:
            self._recorder.begin()
            self._steps.step()
            self._recorded.append((self._recorder.operations, self._recorder.phases))
        return self._recorded[number][0]

    def phase(self, number: int, index: int) -> StepPhase:
        """Return the phase of the operation `index` of a step that was recorded."""
        _, phases = self._recorded[number]
        return phases[bisect_right(phases, index, key=lambda each: each[0]) - 1][1]


class UnevenStepError(ValueError):
    """A traced step frees a tensor twice, for example if blocks keep tensors of other blocks."""


def _peak_position(trace: AllocationTrace, rounding: int) -> tuple[int, int, int]:
    """Return the step and the operation with the most bytes, and the temporary bytes among them."""
    total = most = peak_temporary = 0
    position = (0, 0)
    live: dict[int, int] = {}
    for number in range(_STEADY_STEP + 1):
        for index, (key, nbytes) in enumerate(trace.operations(number)):
            temporary = 0
            if nbytes > 0:
                live[key] = size = -(-nbytes // rounding) * rounding
                total += size
            elif nbytes:
                temporary = -nbytes
            elif key in live:
                total -= live.pop(key)
                continue
            else:
                raise UnevenStepError(f"freed twice: {key}")
            # Among equal peaks, take the first in the latest step, which has all optimizer states.
            if total + temporary >= most and (total + temporary > most or number > position[0]):
                most, peak_temporary, position = total + temporary, temporary, (number, index)
    return *position, peak_temporary


def find_peak(trace: AllocationTrace, purpose: Callable[[int], Purpose], rounding: int) -> Peak:
    """Return the peak of the allocated bytes, usually in a step after the first step.

    `purpose` maps keys to purposes. Requests are rounded up to multiples of `rounding` bytes.
    """
    number, index, temporary = _peak_position(trace, rounding)
    live: dict[int, int] = {}
    earlier_steps = chain.from_iterable(map(trace.operations, range(number)))
    for key, nbytes in chain(earlier_steps, trace.operations(number)[: index + 1]):
        if nbytes > 0:
            live[key] = nbytes
        elif not nbytes:
            del live[key]
    breakdown = dict.fromkeys(Category, 0)
    nbytes_of: Counter[tuple[Category, str]] = Counter()
    count_of: Counter[tuple[Category, str]] = Counter()
    for key, nbytes in live.items():
        each = purpose(key)
        breakdown[each.category] += nbytes
        nbytes_of[each.category, each.description] += nbytes
        count_of[each.category, each.description] += 1
    breakdown[Category.WORKSPACES] += temporary
    most = nbytes_of.most_common(_MOST_LISTED)
    largest = tuple(LargestTensors(*kind, count_of[kind], nbytes) for kind, nbytes in most)
    return Peak(trace.phase(number, index), breakdown, largest)


def replay(trace: AllocationTrace, allocator: CachingAllocator) -> None:
    """Replay steps until a step does not raise the peaks."""
    old_peaks = (-1, -1)  # allocated, reserved
    for number in range(_MAX_REPLAYED_STEPS + 1):
        for key, nbytes in trace.operations(number):
            if nbytes > 0:
                allocator.allocate(key, nbytes)
            elif nbytes == 0:
                allocator.free(key)
            else:
                allocator.allocate_temporary(key, -nbytes)
        peaks = (allocator.peak_allocated, allocator.peak_reserved)
        if peaks == old_peaks:
            return
        if number:  # step 0 only builds the model
            old_peaks = peaks


@dataclass(frozen=True)
class StepEstimate:
    """The peak memory of a rank, in bytes, and the peak's allocations."""

    device: str
    allocator_name: str  # launch.allocator
    peak: Peak
    trace: AllocationTrace
    recorder: MemoryRecorder

    @cached_property
    def _peaks(self) -> tuple[int, int]:
        """The allocated and the reserved bytes of the run's allocator."""
        return self._replayed(self.allocator_name)

    def _replayed(self, name: str) -> tuple[int, int]:
        """Return the allocated and the reserved bytes at the peak; on the CPU, both are equal."""
        if self.device == "cpu":
            return (sum(self.peak.breakdown.values()),) * 2
        with without_gc():
            replay(self.trace, allocator := self._new_allocator(name))
        return allocator.peak_allocated, allocator.peak_reserved

    def _new_allocator(self, name: str, capacity: int | None = None) -> CachingAllocator:
        expandable, streams = name == "expandable", self.recorder.streams
        return CachingAllocator(expandable=expandable, capacity=capacity, streams=streams)

    @property
    def allocated(self) -> int:
        return self._peaks[0]

    @property
    def peak_reserved(self) -> int:
        return self._peaks[1]

    @property
    def reserved(self) -> dict[str, int]:
        """Reserved bytes by allocator."""
        return {
            name: self.peak_reserved if name == self.allocator_name else self._replayed(name)[1]
            for name in ALLOCATORS
        }

    @property
    def breakdown(self) -> dict[str, int]:
        """Bytes at the peak by category; their sum is `allocated`."""
        parts = {category.value: nbytes for category, nbytes in self.peak.breakdown.items()}
        return {**parts, "rounding": self.allocated - sum(parts.values())}

    def verdict(self, available: int) -> str:
        """Return `fits`, `thrashes` or `too_large` for a device with `available` bytes.

        A run thrashes if it fits only because the allocator empties its cache.
        """
        if sum(self.peak.breakdown.values()) > available:  # a lower bound of `allocated`
            return "too_large"
        if self.peak_reserved <= available:
            return "fits"
        if self.device == "cpu" or self.allocated > available:
            return "too_large"
        try:
            replay(self.trace, self._new_allocator(self.allocator_name, available))
        except DeviceFullError:
            return "too_large"
        return "thrashes"

    def to_dict(self) -> dict[str, Any]:
        """Return the part of `estimate-memory --json` that does not depend on the configuration."""
        return {
            "peak_allocated_bytes": self.allocated, "peak_reserved_bytes": self.peak_reserved,
            "allocator": self.allocator_name, "reserved_bytes": self.reserved,
            "breakdown": self.breakdown, "peak_at": str(self.peak.phase),
            "largest": [
                {
                    "category": x.category.value, "what": x.description,
                    "count": x.count, "bytes": x.nbytes,
                }
                for x in self.peak.largest
            ],
            "counts_activations": True,
        }  # fmt: skip


def estimate_steps(
    recorder: MemoryRecorder, steps: Steps, *, device: str, allocator: str, draws: bool
) -> StepEstimate:
    """Estimate the peak memory of `steps`, which record their operations in `recorder`.

    On `device` cpu, requests are not rounded. `draws`: weights are initialized on the device.
    """
    cuda = device == "cuda"
    with without_gc():
        trace = AllocationTrace(recorder, steps, draws=draws, cuda=cuda)
        peak = find_peak(trace, recorder.purpose, _ROUNDING if cuda else 1)
    return StepEstimate(device, allocator, peak, trace, recorder)
