"""The losses of two runs, step by step, from what their metrics.jsonl say."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdpctl.errors import UsageError
from fsdpctl.io.documents import parse_json
from fsdpctl.io.files import open_regular
from fsdpctl.run.files import METRICS

FIGURES = ("loss", "val_loss", "grad_norm")
_LONGEST = 1 << 20  # bytes of a line
Values = dict[int, float | None]  # by step; None: was not finite


@dataclass(frozen=True, slots=True)
class Point:
    """A step, and what both runs had there."""

    step: int
    a: float | None  # None: not finite
    b: float | None

    @property
    def difference(self) -> float:
        """How far they are apart; infinite where one is not finite."""
        if self.a is None or self.b is None:
            return 0.0 if self.a is self.b else math.inf
        return abs(self.a - self.b)


@dataclass(frozen=True, slots=True)
class Series:
    """One figure of two runs."""

    name: str
    compared: int  # steps that both have
    only_a: int  # steps
    only_b: int
    first: Point | None  # the first step where they differ
    largest: Point | None  # the one where they differ most
    num_different: int

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        found = asdict(self)
        if self.largest is not None:
            apart = self.largest.difference
            found["largest"]["difference"] = apart if math.isfinite(apart) else None
        return found


def read_figures(run_dir: Path) -> dict[str, Values]:
    """The figures of every step in a run's metrics.jsonl, by name; of a step done twice the last.

    Raises:
        UsageError: there is none, or it is damaged.
    """
    path = run_dir / METRICS
    found: dict[str, Values] = {name: {} for name in FIGURES}
    with open(open_regular(path), "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST), b""), start=1):
            if not line.endswith(b"\n") and not file.read(1):  # torn, or just being written
                break
            try:
                _add(parse_json(line, dict[str, Any], str(path)), found)
            except (UsageError, TypeError, KeyError):
                raise UsageError(f"{path}: line {number} is damaged") from None
    return found


def _add(line: Mapping[str, Any], found: dict[str, Values]) -> None:
    for name in FIGURES:
        if name in line:
            value = line[name]
            found[name][int(line["step"])] = None if value is None else float(value)


def compared(name: str, a: Values, b: Values) -> Series:
    """How `name` differs between two runs."""
    both = sorted(a.keys() & b.keys())
    points = [Point(step, a[step], b[step]) for step in both]
    apart = [point for point in points if point.difference > 0]
    return Series(
        name,
        compared=len(both),
        only_a=len(a.keys() - b.keys()),
        only_b=len(b.keys() - a.keys()),
        first=apart[0] if apart else None,
        largest=max(apart, key=lambda point: point.difference, default=None),
        num_different=len(apart),
    )
