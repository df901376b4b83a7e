"""A profiled machine: how long operators and collectives took, at several sizes."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fsdpctl.errors import UsageError
from fsdpctl.io.untrusted import read_json
from fsdpctl.predict.compute import Work, WorkKind
from fsdpctl.predict.hardware import NET, NODE, SHARED_CORES, CollectiveKind, Group, HostQueue
from fsdpctl.predict.simulator import Transfer

VERSION = 2
_PAYLOAD = 0.94  # of a network link's rate: what TCP transfers through it both ways at once
_MOVED = 7  # times the master weights that a measured step reads and writes
_NEIGHBORS = 4  # measured products that determine the speed of a product of another size


class MeasuredPoint(NamedTuple):
    """The time that some bytes took."""

    nbytes: float
    seconds: float


class Observed(NamedTuple):
    """The time that an operator took; as in `Work`."""

    name: str
    kind: str
    flops: int
    nbytes: int
    itemsize: int
    dims: tuple[int, int, int, int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Profile:
    """The file that profile-device writes."""

    version: int
    device: str  # its name
    is_cuda: bool
    dtype: str  # of the computation
    ranks: int  # that computed at the same time
    torch: str
    operators: list[Observed]
    host_seconds_per_operator: float  # that no operator's own time includes
    memory_copy: list[MeasuredPoint]  # bytes read and written together
    optimizer_step: list[MeasuredPoint]  # AdamW: bytes of the master weights
    collectives: dict[str, list[MeasuredPoint]] = field(
        default_factory=dict
    )  # by kind; whole buffers
    compute_slowdown: float = 0.0  # share of the computing speed lost during a collective
    comm_slowdown: float = 0.0  # share of a collective's speed lost during computation
    drift: float = 0.0  # as in `Transfer`


def read_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        UsageError: If the file is not a profile or has an unsupported version.
    """
    found = read_json(path, Profile)
    if found.version != VERSION:
        raise UsageError(
            f"{path}: version {found.version} is not supported; expected {VERSION}. "
            "Run profile-device again."
        )
    if not (found.operators and found.memory_copy and found.optimizer_step):
        raise UsageError(f"{path}: operators, memory_copy and optimizer_step are required")
    if found.collectives and set(found.collectives) != {each.value for each in CollectiveKind}:
        raise UsageError(f"{path}: collectives: expected all of {', '.join(CollectiveKind)}")
    slowdowns = {name: getattr(found, name) for name in ("compute_slowdown", "comm_slowdown")}
    for name, share in slowdowns.items():
        if not 0 <= share < 1:
            raise UsageError(f"{path}: {name}: expected a number from 0 to below 1, got {share}")
    if found.ranks < 1 or found.drift < 0:
        raise UsageError(f"{path}: ranks must be at least 1, and drift at least 0")
    curves = {name: getattr(found, name) for name in ("memory_copy", "optimizer_step")}
    for name, points in {**curves, **found.collectives}.items():
        sizes = [point.nbytes for point in points]
        if not points or sizes != sorted(set(sizes)) or any(min(each) <= 0 for each in points):
            raise UsageError(f"{path}: {name}: expected increasing sizes and positive times")
    if any(each.seconds <= 0 for each in found.operators) or found.host_seconds_per_operator < 0:
        raise UsageError(f"{path}: operators: expected positive times")
    return found


def on_curve(points: Sequence[MeasuredPoint], nbytes: float) -> float:
    """Return the seconds for `nbytes`.

    They are linear between measured points, the first point's below them, and at the last point's
    rate above.
    """
    if nbytes <= points[0].nbytes:
        return points[0].seconds  # latency
    if nbytes >= points[-1].nbytes:
        return points[-1].seconds * nbytes / points[-1].nbytes
    index = bisect_left(points, nbytes, key=lambda point: point.nbytes)
    (low, fast), (high, slow) = points[index - 1], points[index]
    return fast + (slow - fast) * (nbytes - low) / (high - low)


class MeasuredDevice:
    """The device of a profile."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._by_name: dict[str, list[Observed]] = defaultdict(list)
        self._by_kind: dict[str, list[Observed]] = defaultdict(list)
        for each in profile.operators:
            self._by_name[each.name].append(each)
            self._by_kind[each.kind].append(each)
        self._known: dict[Work, float] = {}

    host_seconds = step_overhead = unit_seconds = 0.0  # the measured times include them

    def seconds(self, work: Work) -> float:
        """Return the time of an operator that runs alone, with the host's share."""
        if work not in self._known:
            host = self._profile.host_seconds_per_operator
            self._known[work] = self._seconds(work) + host
        return self._known[work]

    def copy_seconds(self, nbytes: float) -> float:
        """Return the time to read and write `nbytes` in total."""
        return on_curve(self._profile.memory_copy, nbytes)

    def optimizer_seconds(self, nbytes: float, moments: int) -> float:
        """Return the time of a step, which was measured with two moments."""
        return on_curve(self._profile.optimizer_step, nbytes) * (3 + 2 * moments) / _MOVED

    def _seconds(self, work: Work) -> float:
        like = self._by_name.get(work.name) or self._by_kind.get(work.kind.value)
        if not like:
            return self.copy_seconds(work.nbytes)
        if work.kind is WorkKind.MEMORY:
            return on_curve(_curve(like), work.nbytes)
        near = sorted(like, key=lambda each: _distance(each.dims, work.dims))[:_NEIGHBORS]
        weights = [1 / (0.01 + _distance(each.dims, work.dims)) for each in near]
        rates = [each.flops / each.seconds for each in near]
        # A mean of times, not of rates: the slow ones count.
        per_flop = sum(w / r for w, r in zip(weights, rates, strict=True)) / sum(weights)
        return work.flops * per_flop


def _curve(observed: Sequence[Observed]) -> list[MeasuredPoint]:
    """Return the times by bytes, the mean if several had the same bytes."""
    alike: dict[int, list[float]] = defaultdict(list)
    for each in observed:
        alike[each.nbytes].append(each.seconds)
    return [MeasuredPoint(size, sum(times) / len(times)) for size, times in sorted(alike.items())]


def _distance(one: Sequence[int], other: Sequence[int]) -> float:
    """Return the squared distance, in doublings of each size."""
    return sum(
        (math.log2(max(1, a)) - math.log2(max(1, b))) ** 2 for a, b in zip(one, other, strict=True)
    )


@dataclass(frozen=True, slots=True)
class MeasuredHost:
    """The host of a CPU rank, which shares its cores."""

    profile: Profile

    def transfer(self, queue: HostQueue, nbytes: float) -> Transfer:
        """Price a step that reads and writes `nbytes` in total, or a copy of as many."""
        if queue is HostQueue.STEPS:
            seconds = on_curve(self.profile.optimizer_step, nbytes / _MOVED)
            return Transfer(queue, 0.0, seconds, 0.0, SHARED_CORES, SHARED_CORES)
        return Transfer(queue, 0.0, on_curve(self.profile.memory_copy, 2 * nbytes), nbytes)


@dataclass(frozen=True, slots=True)
class MeasuredNetwork:
    """The profiled links within a node, and network links between nodes."""

    profile: Profile  # with collectives
    inter: float | None  # bytes/s of a node; None: as fast as within it

    def transfer(self, kind: CollectiveKind, nbytes: float, group: Group) -> Transfer:
        """Price a collective as measured, or by the network link if that is slower."""
        if group.ranks == 1:
            return Transfer(NODE, 0.0, 0.0)
        profile, curve = self.profile, self.profile.collectives[kind.value]
        # More ranks send more than the profiled ones.
        scale = ((group.ranks - 1) / group.ranks) / ((profile.ranks - 1) / profile.ranks)
        within = on_curve(curve, nbytes) * scale
        rounds = 2 if kind is CollectiveKind.ALL_REDUCE else 1
        sent = rounds * nbytes * (group.ranks - 1) / group.ranks
        latency = min(within, curve[0].seconds)
        slowdowns = profile.compute_slowdown, profile.comm_slowdown
        if group.nodes == 1 or self.inter is None:
            return Transfer(NODE, latency, within - latency, sent, *slowdowns, profile.drift)
        # A rank sends alike to all others; this share of them is on other nodes.
        elsewhere = (group.ranks - group.ranks_per_node) / (group.ranks - 1)
        leaving = group.ranks_per_node * sent * elsewhere
        between = leaving / (self.inter * _PAYLOAD)
        busy = min(1.0, within / (between or within))
        if between > within:
            slowdowns = profile.compute_slowdown * busy, 0.0
        seconds = max(within - latency, between)
        return Transfer(NET, latency, seconds, leaving, *slowdowns, profile.drift)
