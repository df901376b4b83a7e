"""Comparison of the tensors of two checkpoints, element by element, in a few MiB of memory."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpctl.checkpoint.cast import numbers
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.io.activity import BYTES, Advance, doing
from fsdpctl.plan.layout import Span

# Elements read at a time; stored chunks at the edges are read and verified completely.
_WINDOW = 1 << 22


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The difference of a tensor between two checkpoints."""

    key: str
    numel: int
    num_different: int  # elements
    max_abs: float | None  # None: only one of them is finite in some element
    relative_norm: float | None  # of the difference, relative to the larger of the two norms
    about: str = ""  # a difference in shape or dtype

    @property
    def differs(self) -> bool:
        """Whether any element, the shape or the dtype differs."""
        return self.num_different > 0 or bool(self.about)

    @property
    def badness(self) -> tuple[float, float]:
        """A value that is larger for worse differences."""
        if self.about or self.max_abs is None or self.relative_norm is None:
            return math.inf, math.inf
        return self.relative_norm, self.max_abs


@dataclass(frozen=True, slots=True)
class CheckpointDifference:
    """The difference of two checkpoints of the same step."""

    step: int
    tensors: tuple[TensorDifference, ...]  # of tensors in both, the worst first
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def different(self) -> tuple[TensorDifference, ...]:
        """The tensors that differ."""
        return tuple(each for each in self.tensors if each.differs)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {
            "step": self.step,
            "num_tensors": len(self.tensors),
            "different": [asdict(each) for each in self.different],
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
        }


def compare_checkpoints(a: CheckpointReader, b: CheckpointReader) -> CheckpointDifference:
    """Compare every tensor of two checkpoints, written by any numbers of ranks.

    Raises:
        CheckpointError: If a checksum does not match; the message names the file.
    """
    ours, theirs = a.manifest.tensors.keys(), b.manifest.tensors.keys()
    with doing("comparing checkpoints", BYTES, a.num_bytes + b.num_bytes) as advance:
        found = [_compare(a, b, key, advance) for key in sorted(ours & theirs)]
    found.sort(key=lambda each: each.badness, reverse=True)
    return CheckpointDifference(
        a.manifest.progress.step,
        tuple(found),
        tuple(sorted(ours - theirs)),
        tuple(sorted(theirs - ours)),
    )


def _compare(
    a: CheckpointReader, b: CheckpointReader, key: str, advance: Advance
) -> TensorDifference:
    one, other = a.info(key), b.info(key)
    if list(one.shape) != list(other.shape):
        shapes = " and ".join("x".join(map(str, each.shape)) or "scalar" for each in (one, other))
        return TensorDifference(key, one.numel, 0, None, None, f"shapes {shapes}")
    sums = _Sums()
    for start in range(0, one.numel, _WINDOW):
        span = Span(start, min(start + _WINDOW, one.numel))
        sums.add(_numbers(a, key, span, advance), _numbers(b, key, span, advance))
    about = "" if one.dtype == other.dtype else f"dtypes {one.dtype} and {other.dtype}"
    return TensorDifference(key, one.numel, sums.different, *sums.result, about)


def _numbers(
    reader: CheckpointReader, key: str, span: Span, advance: Advance
) -> NDArray[np.float64]:
    values, dtype = np.empty(span.numel), reader.info(key).dtype
    for held, data in reader.read(key, span):
        values[held.start - span.start : held.stop - span.start] = numbers(data, dtype)
        advance(len(data))
    return values


class _Sums:
    """The difference of a tensor in the elements so far."""

    def __init__(self) -> None:
        self.different = 0
        self._max, self._apart, self._norms = 0.0, 0.0, [0.0, 0.0]

    def add(self, a: NDArray[np.float64], b: NDArray[np.float64]) -> None:
        """Add the next elements; NaN equals NaN."""
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        self.different += int(a.size - np.count_nonzero(same))
        for which, values in enumerate((a, b)):
            self._norms[which] += float(np.dot(values, values))
        if same.all():
            return
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.where(same, 0.0, np.abs(a - b))
        self._max = max(self._max, float(np.nan_to_num(apart, nan=math.inf, posinf=math.inf).max()))
        self._apart += float(np.dot(apart, apart))

    @property
    def result(self) -> tuple[float | None, float | None]:
        """The largest difference, and the relative norm of the difference."""
        largest = max(self._norms)
        if not math.isfinite(self._max):
            return None, None
        if not math.isfinite(largest):  # both have infinite values or NaN
            return self._max, None if self.different else 0.0
        return self._max, math.sqrt(self._apart / largest) if largest else 0.0
