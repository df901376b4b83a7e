"""A machine as it was measured: what operators took, and collectives, at several sizes."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fsdpctl.errors import UsageError
from fsdpctl.io.documents import read_json
from fsdpctl.plan.work import Work, WorkKind
from fsdpctl.predict.network import NET, NODE, CollectiveKind, Group
from fsdpctl.predict.tasks import Transfer

VERSION = 1
_PAYLOAD = 0.94  # of a cable's rate: what TCP gets through it both ways at once
_NEIGHBOURS = 4  # of what was measured, that say how fast a product of other sizes is


class Point(NamedTuple):
    """How long so many bytes took."""

    nbytes: float
    seconds: float


class Observed(NamedTuple):
    """How long an operator took; as in `Work`."""

    name: str
    kind: str
    flops: int
    nbytes: int
    itemsize: int
    dims: tuple[int, int, int, int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Profile:
    """What profile-device writes."""

    version: int
    device: str  # its name
    is_cuda: bool
    dtype: str  # that was computed in
    ranks: int  # that computed at the same time
    torch: str
    operators: list[Observed]
    per_operator: float  # seconds of the host that are no operator's own
    copying: list[Point]  # read and written together
    stepping: list[Point]  # AdamW: bytes of the masters
    collectives: dict[str, list[Point]] = field(default_factory=dict)  # by kind; whole buffers
    slows: float = 0.0  # share of the arithmetic that is lost beside a collective
    yields: float = 0.0  # share of a collective's speed that is lost beside arithmetic
    drift: float = 0.0  # as in `Transfer`


def read_profile(path: Path) -> Profile:
    """The profile in a file.

    Raises:
        UsageError: it is none, or of another version.
    """
    found = read_json(path, Profile)
    if found.version != VERSION:
        raise UsageError(f"{path}: version {found.version}; this version reads {VERSION}")
    if not (found.operators and found.copying and found.stepping):
        raise UsageError(f"{path}: has no operators, copying or stepping")
    if found.collectives and set(found.collectives) != {each.value for each in CollectiveKind}:
        raise UsageError(f"{path}: collectives: has not all of {', '.join(CollectiveKind)}")
    if found.ranks < 1 or found.drift < 0 or not (0 <= found.slows < 1 > found.yields >= 0):
        raise UsageError(f"{path}: ranks, slows, yields or drift cannot be")
    curves = {"copying": found.copying, "stepping": found.stepping, **found.collectives}
    for name, points in curves.items():
        sizes = [point.nbytes for point in points]
        if not points or sizes != sorted(set(sizes)) or any(min(each) <= 0 for each in points):
            raise UsageError(f"{path}: {name}: sizes must grow, and take time")
    if any(each.seconds <= 0 for each in found.operators) or found.per_operator < 0:
        raise UsageError(f"{path}: operators: each must take time")
    return found


def on_curve(points: Sequence[Point], nbytes: float) -> float:
    """Seconds of so many bytes: straight between what was measured, outside at its edges' rates."""
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

    issuing = per_step = 0.0  # they are in what operators took

    def seconds(self, work: Work) -> float:
        """Of an operator that runs alone, and the host's part of it."""
        if work not in self._known:
            self._known[work] = self._seconds(work) + self._profile.per_operator
        return self._known[work]

    def copying(self, nbytes: float) -> float:
        """Seconds to read and write so many bytes together."""
        return on_curve(self._profile.copying, nbytes)

    def stepping(self, nbytes: float, moments: int) -> float:
        """As measured with two moments; fewer are less to read and to write."""
        return on_curve(self._profile.stepping, nbytes) * (3 + 2 * moments) / 7

    def _seconds(self, work: Work) -> float:
        like = self._by_name.get(work.name) or self._by_kind.get(work.kind.value)
        if not like:
            return self.copying(work.nbytes)
        if work.kind is WorkKind.MEMORY:
            return on_curve(_curve(like), work.nbytes)
        near = sorted(like, key=lambda each: _distance(each.dims, work.dims))[:_NEIGHBOURS]
        weights = [1 / (0.01 + _distance(each.dims, work.dims)) for each in near]
        rates = [each.flops / each.seconds for each in near]
        # A mean of times, not of rates: the slow ones count.
        per_flop = sum(w / r for w, r in zip(weights, rates, strict=True)) / sum(weights)
        return work.flops * per_flop


def _curve(observed: Sequence[Observed]) -> list[Point]:
    """Their times by bytes; the mean where several had as many."""
    alike: dict[int, list[float]] = defaultdict(list)
    for each in observed:
        alike[each.nbytes].append(each.seconds)
    return [Point(size, sum(times) / len(times)) for size, times in sorted(alike.items())]


def _distance(one: Sequence[int], other: Sequence[int]) -> float:
    """Squared, in doublings of each size."""
    return sum(
        (math.log2(max(1, a)) - math.log2(max(1, b))) ** 2 for a, b in zip(one, other, strict=True)
    )


@dataclass(frozen=True, slots=True)
class MeasuredNetwork:
    """The links of a profile within a node; between nodes a cable of so many bytes/s."""

    collectives: Mapping[str, Sequence[Point]]
    ranks: int  # that it was measured with
    slows: float
    yields: float
    drift: float
    inter: float | None  # of a node; None: as fast as within it

    def transfer(self, kind: CollectiveKind, nbytes: float, group: Group) -> Transfer:
        """As long as it took; longer where the cable is slower."""
        if group.ranks == 1:
            return Transfer(NODE, 0.0, 0.0)
        here = on_curve(self.collectives[kind.value], nbytes) * self._scale(group.ranks)
        rounds = 2 if kind is CollectiveKind.ALL_REDUCE else 1
        sent = rounds * nbytes * (group.ranks - 1) / group.ranks
        latency = min(here, self.collectives[kind.value][0].seconds)
        if group.nodes == 1 or self.inter is None:
            return Transfer(
                NODE, latency, here - latency, sent, self.slows, self.yields, self.drift
            )
        leaving = group.ranks_per_node * sent * self._leaves(group)
        cable = leaving / (self.inter * _PAYLOAD)
        busy = min(1.0, here / (cable or here))
        seconds = max(here - latency, cable)
        slow = cable > here
        return Transfer(
            NET,
            latency,
            seconds,
            leaving,
            self.slows * busy,
            0.0 if slow else self.yields,
            self.drift,
        )

    @staticmethod
    def _leaves(group: Group) -> float:
        """The share of what a rank sends that goes to other nodes: to everybody alike."""
        return (group.ranks - group.ranks_per_node) / (group.ranks - 1)

    def _scale(self, ranks: int) -> float:
        """More ranks send more."""
        return ((ranks - 1) / ranks) / ((self.ranks - 1) / self.ranks)
