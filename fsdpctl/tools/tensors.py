"""The tensors of two checkpoints, compared element by element; some megabytes in memory."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpctl.checkpoint.cast import numbers
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.plan.layout import Span

# Elements read at a time; of a stored chunk at its edge the whole is read and checked.
_WINDOW = 1 << 22


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How a tensor that two checkpoints have differs."""

    key: str
    numel: int
    num_different: int  # elements
    max_abs: float | None  # None: one has a number where the other has none, or an infinite one
    relative_norm: float | None  # of the difference, to the larger of the two
    about: str = ""  # why it was not compared element by element

    @property
    def differs(self) -> bool:
        """Whether it does, in any element or in what it is."""
        return self.num_different > 0 or bool(self.about)

    @property
    def badness(self) -> tuple[float, float]:
        """What the worst has most of."""
        if self.about or self.max_abs is None or self.relative_norm is None:
            return math.inf, math.inf
        return self.relative_norm, self.max_abs


@dataclass(frozen=True, slots=True)
class CheckpointDifference:
    """How two checkpoints of one step differ."""

    step: int
    tensors: tuple[TensorDifference, ...]  # that both have, the worst first
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def different(self) -> tuple[TensorDifference, ...]:
        """Those that differ."""
        return tuple(each for each in self.tensors if each.differs)

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        return {
            "step": self.step,
            "num_tensors": len(self.tensors),
            "different": [asdict(each) for each in self.different],
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
        }


def compare_checkpoints(
    a: CheckpointReader, b: CheckpointReader, on_bytes: Callable[[int], None]
) -> CheckpointDifference:
    """Every tensor of both, whatever number of ranks wrote them.

    Args:
        a: one.
        b: another.
        on_bytes: called with the bytes read since the last call.

    Raises:
        CheckpointError: a checksum does not match; names the file.
    """
    ours, theirs = a.manifest.tensors.keys(), b.manifest.tensors.keys()
    found = [_compare(a, b, key, on_bytes) for key in sorted(ours & theirs)]
    found.sort(key=lambda each: each.badness, reverse=True)
    return CheckpointDifference(
        a.manifest.progress.step,
        tuple(found),
        tuple(sorted(ours - theirs)),
        tuple(sorted(theirs - ours)),
    )


def _compare(
    a: CheckpointReader, b: CheckpointReader, key: str, on_bytes: Callable[[int], None]
) -> TensorDifference:
    one, other = a.info(key), b.info(key)
    if list(one.shape) != list(other.shape):
        shapes = " and ".join("x".join(map(str, each.shape)) or "scalar" for each in (one, other))
        return TensorDifference(key, one.numel, 0, None, None, f"shapes {shapes}")
    sums = _Sums()
    for start in range(0, one.numel, _WINDOW):
        span = Span(start, min(start + _WINDOW, one.numel))
        sums.add(_numbers(a, key, span, on_bytes), _numbers(b, key, span, on_bytes))
    about = "" if one.dtype == other.dtype else f"dtypes {one.dtype} and {other.dtype}"
    return TensorDifference(key, one.numel, sums.different, *sums.result, about)


def _numbers(
    reader: CheckpointReader, key: str, span: Span, on_bytes: Callable[[int], None]
) -> NDArray[np.float64]:
    values, dtype = np.empty(span.numel), reader.info(key).dtype
    for held, data in reader.read(key, span):
        values[held.start - span.start : held.stop - span.start] = numbers(data, dtype)
        on_bytes(len(data))
    return values


class _Sums:
    """What is known of a tensor after some of its elements."""

    def __init__(self) -> None:
        self.different = 0
        self._max, self._apart, self._norms = 0.0, 0.0, [0.0, 0.0]

    def add(self, a: NDArray[np.float64], b: NDArray[np.float64]) -> None:
        """The next elements; NaN is what NaN is."""
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
        """The largest difference, and the norm of all in relation to that of the tensor."""
        largest = max(self._norms)
        if not math.isfinite(self._max):
            return None, None
        if not math.isfinite(largest):  # something infinite, or NaN, that both have
            return self._max, None if self.different else 0.0
        return self._max, math.sqrt(self._apart / largest) if largest else 0.0
