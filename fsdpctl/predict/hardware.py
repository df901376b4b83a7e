"""What computes and what sends, as far as time depends on it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from fsdpctl.plan.attention import FLASH
from fsdpctl.plan.work import Work, WorkKind

_ATTENTION = (WorkKind.ATTENTION, WorkKind.ATTENTION_BACKWARD)


class Device(Protocol):
    """What computes."""

    def seconds(self, work: Work) -> float:
        """Of an operator that runs alone."""
        ...

    def copying(self, nbytes: float) -> float:
        """Seconds to read and write so many bytes together."""
        ...

    def stepping(self, nbytes: float, moments: int) -> float:
        """Seconds of an optimizer that keeps so many moments, for masters of so many bytes."""
        ...

    @property
    def issuing(self) -> float:
        """Seconds of the host for each operator, beside which the device computes."""
        ...

    @property
    def per_step(self) -> float:
        """Seconds of a step that no operator accounts for."""
        ...


@dataclass(frozen=True, slots=True)
class DataSheet:
    """A GPU as its maker describes it, with the shares of that which kernels reach.

    Rates are of dense arithmetic. Efficiencies were measured by others, see docs/time-model.md.
    """

    flops: Mapping[int, float]  # FLOP/s by bytes of an element
    bandwidth: float  # bytes/s of its memory
    matmul: float  # share of FLOP/s that large products reach within a step
    attention: Mapping[str, float]  # the same of attention over long sequences, by kernel
    in_step: float  # of each operator's speed when it runs alone
    fuses: bool = False  # whether a compiler brings operators that read and write together
    per_step: float = 0.0

    def seconds(self, work: Work) -> float:
        """By the roofline: arithmetic or memory, whichever takes longer, and its launch."""
        if work.kind is WorkKind.MEMORY:
            share = _FUSED if self.fuses else 1.0
            return self.copying(work.nbytes * share) + _LAUNCH * share
        rate = self.flops[work.itemsize] * self._share(work)
        moved = work.nbytes / (self.bandwidth * _streaming(work.nbytes))
        return max(work.flops / rate, moved) / self.in_step + _LAUNCH

    @property
    def issuing(self) -> float:
        """Of Python, dispatcher, autograd and driver; a compiler brings operators together."""
        return _ISSUING * (_FUSED if self.fuses else 1.0)

    def copying(self, nbytes: float) -> float:
        """At the share of the bandwidth that so many bytes reach."""
        return nbytes / (self.bandwidth * _streaming(nbytes)) / self.in_step

    def stepping(self, nbytes: float, moments: int) -> float:
        """In one kernel: reads master, gradient and moments, writes all but the gradient."""
        return self.copying((3 + 2 * moments) * nbytes)

    def _attention(self, work: Work) -> float:
        """Of the kernel that torch's operator runs; float32 has a peak of its own."""
        kernel = next((name for name in self.attention if name in work.name), FLASH)
        return self.attention[kernel if work.itemsize == _TWO_BYTES else FLASH]

    def _share(self, work: Work) -> float:
        if work.kind in _ATTENTION:
            _, _, length, width = work.dims
            # Narrower heads keep fewer units busy, by the fourth root of their width.
            by_width = math.sqrt(math.sqrt(min(1.0, width / 128)))
            return self._attention(work) * length / (length + _HALF_LENGTH) * by_width
        _, rows, columns, length = work.dims
        return self.matmul * length / (length + _HALF_SUM) * _alignment(rows, columns, length)


_TWO_BYTES = 2
_FUSED = 0.4  # of the bytes that operators move one by one: what a compiler leaves of them
_ISSUING = 9e-6  # seconds
_LAUNCH = 2e-6  # seconds: the least that a kernel takes
_HALF_LENGTH = 560  # of sequences at which attention reaches half of its speed
_HALF_SUM = 130  # of the sums of a product, alike


def _streaming(nbytes: float) -> float:
    """The share of the memory's bandwidth that a kernel reaches that moves so many bytes."""
    if nbytes >= 64e6:
        return 0.85
    return 0.70 if nbytes >= 8e6 else 0.5


def _alignment(*sizes: int) -> float:
    """What is lost where a matrix does not divide into tiles."""
    if any(size % 8 for size in sizes if size > 1):
        return 0.65
    return 0.95 if any(size % 64 for size in sizes if size > 64) else 1.0
